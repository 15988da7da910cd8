#pragma once

#include <cstdio>
#include <cstdlib>

// Ends the test with the place and the condition that does not hold.
#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                        \
        }                                                                        \
    } while (false)

// The statement throws `exception`.
#define CHECK_THROWS(exception, statement) \
    do {                                   \
        bool thrown = false;               \
        try {                              \
            statement;                     \
        } catch (const exception&) {       \
            thrown = true;                 \
        }                                  \
        CHECK(thrown);                     \
    } while (false)

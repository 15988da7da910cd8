// Counting, from several threads: nothing is lost, nothing is counted twice, late is not early.

#include "fabric/immediate_table.h"

#include <thread>

#include "check.h"

using namespace kvmesh::fabric;

namespace {

bool completed(EventQueue& events, uint64_t token) {
    bool found = false;
    for (const Event& event : events.drain()) found = found || event.token == token;
    return found;
}

void add(ImmediateTable& table, uint32_t immediate, size_t times) {
    std::vector<uint32_t> many(times, immediate);
    CHECK(table.add(many));
}

void states() {
    EventQueue events;
    ImmediateTable table(events);
    table.arm(1, 0, 10);
    CHECK(completed(events, 10));
    add(table, 2, 3);
    table.arm(2, 5, 11);
    CHECK(!completed(events, 11));
    add(table, 2, 2);
    CHECK(completed(events, 11));
    add(table, 2, 100);
    CHECK(!completed(events, 11));  // Once.
    CHECK_THROWS(SetupError, table.arm(2, 1, 12));
    table.disarm(2, 999);  // Somebody else's token.
    CHECK(!table.closed(2));
    table.disarm(2, 11);
    CHECK(table.closed(2));
    add(table, 2, 7);
    CHECK(table.late() == 7);
    table.arm(2, 1, 13);
    CHECK(!completed(events, 13));
    add(table, 2, 1);
    CHECK(completed(events, 13));
}

void bounds() {
    EventQueue events;
    ImmediateTable table(events);
    for (uint32_t i = 0; i < 65536; ++i) add(table, i, 1);
    std::vector<uint32_t> one_more{65536};
    CHECK(!table.add(one_more));
    table.arm(0, 1, 1);  // One leaves, one may come.
    CHECK(completed(events, 1) && table.add(one_more));
    // Closed ones are forgotten at last, and then a new arrival is early again.
    for (uint32_t i = 100'000; i < 200'000; ++i) {
        table.arm(i, 1, i);
        table.disarm(i, i);
    }
    CHECK(!table.closed(100'000) && table.closed(199'999));
}

void races() {
    EventQueue events;
    ImmediateTable table(events);
    constexpr uint32_t kImmediates = 500, kEach = 40;
    std::thread engine([&] {
        for (uint32_t round = 0; round < kEach; ++round)
            for (uint32_t i = 0; i < kImmediates; ++i) add(table, i, 1);
    });
    for (uint32_t i = 0; i < kImmediates; ++i) table.arm(i, kEach, 1000 + i);
    size_t seen = 0;
    while (seen < kImmediates) seen += events.drain().size();
    engine.join();
    CHECK(seen == kImmediates && table.arrived() == kImmediates * kEach);
}

}  // namespace

int main() {
    states();
    bounds();
    races();
}

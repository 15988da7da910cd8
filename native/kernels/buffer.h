// Aligned memory that the kernel may back with huge pages; not initialised.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace kvmesh {

struct Release {
    void operator()(void* p) const { std::free(p); }
};

template <class T>
using Buffer = std::unique_ptr<T[], Release>;

constexpr int64_t kHugePage = 2 << 20;

template <class T>
Buffer<T> allocate(int64_t count) {
    int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    bool huge = bytes >= 2 * kHugePage;
    int64_t alignment = huge ? kHugePage : 64;
    bytes = (bytes + alignment - 1) / alignment * alignment;
    void* p = std::aligned_alloc(alignment, bytes > 0 ? bytes : alignment);
    if (!p) throw std::bad_alloc();
    if (huge) madvise(p, bytes, MADV_HUGEPAGE);
    return Buffer<T>(static_cast<T*>(p));
}

}  // namespace kvmesh

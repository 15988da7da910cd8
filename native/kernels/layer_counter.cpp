#include "layer_counter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>

namespace kvmesh {

uint64_t advance(uint64_t* word) {
    uint64_t value = std::atomic_ref<uint64_t>(*word).fetch_add(1, std::memory_order_release) + 1;
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    return value;
}

uint64_t read_counter(const uint64_t* word) {
    return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
}

}  // namespace kvmesh

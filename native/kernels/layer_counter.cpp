#include "layer_counter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <ctime>

namespace kvmesh {

uint64_t advance(uint64_t* word) {
    uint64_t value = std::atomic_ref<uint64_t>(*word).fetch_add(1, std::memory_order_release) + 1;
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    return value;
}

uint64_t read_counter(const uint64_t* word) {
    return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
}

uint64_t wait_above(const uint64_t* word, uint64_t value, double timeout_s) {
    using Clock = std::chrono::steady_clock;
    auto deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
    for (;;) {
        uint64_t now = read_counter(word);
        auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
        if (now > value || left <= 0) return now;
        timespec wait{static_cast<time_t>(left / 1000000000), static_cast<long>(left % 1000000000)};
        syscall(SYS_futex, word, FUTEX_WAIT, static_cast<uint32_t>(now), &wait, nullptr, 0);
    }
}

}  // namespace kvmesh

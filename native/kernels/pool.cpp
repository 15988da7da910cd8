#include "pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <stdexcept>

#include "pause.h"

namespace kvmesh {

namespace {

constexpr int kSpins = 4000;  // tens of microseconds: longer than the gap between two jobs of a forward

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
    syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

Pool::Pool(int threads) {
    if (threads < 1 || threads > 1024) throw std::invalid_argument("threads: takes 1 to 1024");
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
    stop_.store(true);
    signal_.fetch_add(1);
    futex(signal_, FUTEX_WAKE, INT_MAX);
    for (auto& worker : workers_) worker.join();
}

void Pool::start(Call call, void* context, int64_t items) {
    if (items >= int64_t{1} << 32) throw std::invalid_argument("too many items");
    uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;  // odd: nothing can be claimed
    ticket_.store(job << 32);
    call_.store(call, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    items_.store(static_cast<uint32_t>(items), std::memory_order_release);
    done_.store(0, std::memory_order_relaxed);
    ticket_.store((job + 1) << 32);
    signal_.fetch_add(1);
    if (sleepers_.load() > 0) futex(signal_, FUTEX_WAKE, INT_MAX);
    while (claim_one(0)) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) < items; ++spins) {
        if (spins < kSpins)
            pause_briefly();
        else
            std::this_thread::yield();  // a worker holds an item and does not run: let it
    }
}

bool Pool::claim_one(int thread) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
        if ((ticket >> 32) & 1) return false;
        // Who reads a later job's field has seen its odd ticket too, and the compare-and-swap fails.
        Call call = call_.load(std::memory_order_acquire);
        void* context = context_.load(std::memory_order_acquire);
        uint32_t items = items_.load(std::memory_order_acquire);
        uint32_t item = static_cast<uint32_t>(ticket);
        if (item >= items) return false;
        if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            call(context, item, thread);
            done_.fetch_add(1, std::memory_order_release);
            return true;
        }
    }
}

void Pool::work(int thread) {
    uint32_t seen = signal_.load();
    while (!stop_.load()) {
        while (claim_one(thread)) {
        }
        sleep_until_change(seen);
        seen = signal_.load();
    }
}

void Pool::sleep_until_change(uint32_t seen) {
    for (int spins = 0; spins < kSpins; ++spins) {
        if (signal_.load(std::memory_order_acquire) != seen) return;
        pause_briefly();
    }
    sleepers_.fetch_add(1);
    while (signal_.load() == seen) futex(signal_, FUTEX_WAIT, seen);
    sleepers_.fetch_sub(1);
}

}  // namespace kvmesh

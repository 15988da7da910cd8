#include "fabric/watcher.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace kvmesh::fabric {

namespace {

constexpr size_t kCounterBytes = 8;
// A net under a wake-up that was missed; `arm` looks at the counter itself.
constexpr int64_t kMaxWait = 100'000'000;

uint32_t* low_half(std::byte* base) { return reinterpret_cast<uint32_t*>(base); }

}  // namespace

LayerWatcher::LayerWatcher(int counter_fd, Engines& engines, int64_t poll_ns)
    : engines_(engines), mapping_(counter_fd, kCounterBytes), poll_ns_(poll_ns), thread_([this] { run(); }) {}

uint64_t LayerWatcher::counter() const {
    return __atomic_load_n(reinterpret_cast<const uint64_t*>(mapping_.base()), __ATOMIC_ACQUIRE);
}

void LayerWatcher::arm(uint64_t first, std::vector<PartPtr> parts) {
    uint32_t layers = 0;
    for (const PartPtr& part : parts) layers = std::max(layers, part->plan().num_layers);
    std::lock_guard lock(mutex_);
    engines_.start(parts, 0);
    if (layers == 0) return;
    plans_.push_back({first, layers, 0, std::move(parts)});
    release_reached();
    armed_.notify_one();
}

// Under the mutex.
void LayerWatcher::release_reached() {
    uint64_t reached = counter();
    while (!plans_.empty()) {
        Plan& plan = plans_.front();
        uint64_t passed = reached > plan.first ? std::min<uint64_t>(reached - plan.first, plan.layers) : 0;
        if (passed <= plan.released) return;
        plan.released = static_cast<uint32_t>(passed);
        engines_.release(plan.parts, plan.released);
        if (plan.released < plan.layers) return;
        plans_.pop_front();
    }
}

void LayerWatcher::run() {
    pthread_setname_np(pthread_self(), "kvmesh-watcher");
    std::unique_lock lock(mutex_);
    while (!closed_) {
        if (plans_.empty()) {
            armed_.wait(lock, [this] { return closed_ || !plans_.empty(); });
            continue;
        }
        uint64_t seen = counter();
        release_reached();
        if (plans_.empty()) continue;
        lock.unlock();
        wait_for_change(seen);
        lock.lock();
    }
    done_ = true;
}

void LayerWatcher::wait_for_change(uint64_t seen) {
    int64_t wait_ns = poll_ns_ > 0 ? poll_ns_ : kMaxWait;
    timespec timeout{wait_ns / 1'000'000'000, wait_ns % 1'000'000'000};
    if (poll_ns_ > 0) {
        nanosleep(&timeout, nullptr);
        return;
    }
    // Shared, because another process wakes it. It returns at once when the counter moved since `seen`.
    syscall(SYS_futex, low_half(mapping_.base()), FUTEX_WAIT, static_cast<uint32_t>(seen), &timeout, nullptr, 0);
}

void LayerWatcher::disarm() {
    std::lock_guard lock(mutex_);
    for (Plan& plan : plans_) engines_.cancel(plan.parts);
    plans_.clear();
}

void LayerWatcher::close() {
    {
        std::lock_guard lock(mutex_);
        if (closed_) return;
        closed_ = true;
        for (Plan& plan : plans_) engines_.cancel(plan.parts);
        plans_.clear();
        armed_.notify_one();
    }
    // It may be about to wait: wake it until it is gone.
    while (!done_) {
        syscall(SYS_futex, low_half(mapping_.base()), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
        std::this_thread::yield();
    }
    thread_.join();
}

}  // namespace kvmesh::fabric

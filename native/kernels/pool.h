// A fixed set of threads that share out the items of one job at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace kvmesh {

// The caller of `run` works too, so `Pool(1)` starts no thread. Items are claimed one by one: a thread that the kernel
// does not run delays nobody. Workers spin for some microseconds after a job and then sleep, so an idle pool costs no
// CPU. `run` may be called by one thread at a time.
class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls f(item, thread) once for every item in 0 .. items - 1, thread in 0 .. threads() - 1, and returns when all
    // calls have. `f` must not throw.
    template <class F>
    void run(int64_t items, F&& f) {
        if (items <= 1 || workers_.empty()) {
            for (int64_t i = 0; i < items; ++i) f(i, 0);
            return;
        }
        start([](void* context, int64_t item, int thread) { (*static_cast<F*>(context))(item, thread); }, &f, items);
    }

  private:
    using Call = void (*)(void*, int64_t, int);

    void start(Call call, void* context, int64_t items);
    void work(int thread);
    bool claim_one(int thread);
    void sleep_until_change(uint32_t seen);

    // High half: number of the job, odd while its fields below change. Low half: next item to claim. A claim is a
    // compare-and-swap on the whole, so the fields that were read belong to the job that was claimed from.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<Call> call_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<uint32_t> items_{0};
    alignas(64) std::atomic<uint32_t> signal_{0};  // futex: bumped with every job
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

}  // namespace kvmesh

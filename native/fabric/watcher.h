#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "fabric/engines.h"

namespace kvmesh::fabric {

// Watches one layer counter (see `shared.engine.counter`) on its own thread and lets the engines post each layer's
// writes when the counter passes it. While no plan is armed the thread sleeps; while one is, it waits in the kernel.
class LayerWatcher {
  public:
    // `poll_ns` > 0: nobody wakes the futex (CUDA writes the counter); look that often instead.
    LayerWatcher(int counter_fd, Engines& engines, int64_t poll_ns);
    ~LayerWatcher() { close(); }

    // Layer l of every transfer is posted when the counter reaches `first` + l + 1. Plans are armed in order.
    void arm(uint64_t first, std::vector<PartPtr> parts);
    // Drops every plan; its transfers end as cancelled.
    void disarm();
    void close();

  private:
    struct Plan {
        uint64_t first;
        uint32_t layers;
        uint32_t released = 0;
        std::vector<PartPtr> parts;
    };

    void run();
    void release_reached();
    uint64_t counter() const;
    void wait_for_change(uint64_t seen);

    Engines& engines_;
    Mapping mapping_;
    int64_t poll_ns_;
    std::mutex mutex_;
    std::condition_variable armed_;
    std::deque<Plan> plans_;
    bool closed_ = false;
    std::atomic<bool> done_{false};
    std::thread thread_;
};

}  // namespace kvmesh::fabric

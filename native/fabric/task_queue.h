#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "fabric/socket.h"

namespace kvmesh::fabric {

// Work that any thread hands to the one thread that owns something. The owner sleeps on `fd()`; a push costs a system
// call only while it sleeps.
class TaskQueue {
  public:
    using Task = std::function<void()>;

    TaskQueue() : wake_(make_eventfd()) {}

    int fd() const { return wake_.get(); }

    void push(Task task) {
        {
            std::lock_guard lock(mutex_);
            tasks_.push_back(std::move(task));
        }
        // Pairs with `may_sleep`: either the owner sees the task there, or this sees that it sleeps.
        if (sleeping_.exchange(false)) raise_eventfd(wake_.get());
    }

    // Owner only: true when it did something.
    bool run() {
        std::vector<Task> tasks;
        {
            std::lock_guard lock(mutex_);
            tasks.swap(tasks_);
        }
        for (Task& task : tasks) task();
        return !tasks.empty();
    }

    // Owner only: false when there is work. After true, a push makes `fd()` readable until `awake`.
    bool may_sleep() {
        sleeping_.store(true);
        std::lock_guard lock(mutex_);
        if (tasks_.empty()) return true;
        sleeping_.store(false);
        return false;
    }

    void awake() {
        sleeping_.store(false);
        lower_eventfd(wake_.get());
    }

  private:
    FileDescriptor wake_;
    std::mutex mutex_;
    std::vector<Task> tasks_;
    std::atomic<bool> sleeping_{false};
};

}  // namespace kvmesh::fabric

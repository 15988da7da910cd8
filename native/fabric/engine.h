#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <thread>
#include <unordered_map>

#include "fabric/lane.h"
#include "fabric/task_queue.h"

namespace kvmesh::fabric {

struct EngineOptions {
    bool spin = false;      // poll without ever sleeping
    uint32_t window = 64;   // writes outstanding per peer
    std::vector<int> cpus;  // to run on; empty: anywhere
};

// What a lane's peer needs to write to it.
struct LaneOffer {
    uint64_t lane = 0;
    std::string endpoint;
    std::string doorbell;
};

// What the engine asks of the control connections. Called on the engine's thread; must not block.
struct EngineHooks {
    // A write failed: does the peer live? Answered by `confirm_alive` or `close_lane`.
    std::function<void(uint64_t lane)> on_suspect;
    // The lane's endpoint is about to be closed here; the peer must close its own before the lane is finished.
    std::function<void(uint64_t lane, Fault)> on_broken;
};

// One progress thread, which owns the domain, all lanes and all transfers. Everything else talks to it through its task
// queue. Nothing of Python is ever called on it.
class Engine {
  public:
    static constexpr std::chrono::seconds kPatience{3};
    // Pinning many gigabytes takes its time.
    static constexpr std::chrono::seconds kPinPatience{120};

    Engine(Provider provider, const std::string& host, EngineOptions options, ImmediateTable& immediates,
           EventQueue& events);
    ~Engine() { stop(); }

    void set_hooks(EngineHooks hooks) { hooks_ = std::move(hooks); }
    // Ends the thread; transfers that are left end as lost. Idempotent.
    void stop();

    // Runs `task` on the engine's thread. Returns at once.
    void post(TaskQueue::Task task) { tasks_.push(std::move(task)); }

    // Runs `function` there and returns its result, or throws what it threw. Not from the engine's thread. What it
    // captures must be its own: when the thread does not come back within `patience` this throws, and the function may
    // run later.
    template <typename Function>
    auto call(Function function, std::chrono::seconds patience = kPatience) {
        using Result = decltype(function());
        auto task = std::make_shared<std::packaged_task<Result()>>(std::move(function));
        std::future<Result> result = task->get_future();
        {
            std::lock_guard lock(stop_mutex_);
            if (stopped_) throw SetupError({Status::unavailable, "engine", 0, "the fabric is closed"});
            tasks_.push([task] { (*task)(); });
        }
        if (result.wait_for(patience) != std::future_status::ready) {
            stuck_ = true;
            throw SetupError({Status::unavailable, "engine", 0, "the provider does not return from a call"});
        }
        return result.get();
    }

    // The thread is lost inside the provider: seen with shm, whose peers share locks, when one was killed holding one.
    bool stuck() const { return stuck_; }

    std::shared_ptr<Region> register_region(std::shared_ptr<Mapping> mapping);
    void close_region(const std::shared_ptr<Region>& region);

    // Lanes, for the control thread.
    LaneOffer open_lane();
    void connect_lane(uint64_t lane, const std::string& endpoint, const std::string& doorbell);
    // Closes the endpoint: when it returns nothing of that peer can land (unless `stuck`). Transfers wait for
    // `finish_lane`.
    void close_lane(uint64_t lane, Fault fault);
    void confirm_alive(uint64_t lane);
    void finish_lane(uint64_t lane);

    // Transfers, from any thread.
    void start(TransferPtr transfer, uint32_t released_layers);
    void release(std::vector<TransferPtr> transfers, uint32_t layers);
    void cancel(uint64_t transfer);
    void cancel(std::vector<TransferPtr> transfers);

    // Returns when every immediate that has arrived by now is in the table.
    void settle();

    // A snapshot.
    Stats stats();

  private:
    void run();
    bool step();
    void yield_when_blocked();
    void sleep();
    int sleep_ms() const;
    void wake();
    void finish(const TransferPtr& transfer);
    void admit(const TransferPtr& transfer);
    void stop_transfer(const TransferPtr& transfer, Fault fault);
    void check_lanes();
    void check_deadlines();
    void break_lane(uint64_t lane, Fault fault, TransferPtr culprit);
    void drop_lane(uint64_t lane, const Fault& fault);
    void shut_down();

    EngineOptions options_;
    ImmediateTable& immediates_;
    EventQueue& events_;
    EngineHooks hooks_;
    Nic nic_;
    TaskQueue tasks_;
    FileDescriptor epoll_;
    std::map<uint64_t, std::unique_ptr<Lane>> lanes_;
    std::map<uint64_t, std::unique_ptr<Lane>> retired_;  // closed, not yet finished
    std::vector<fid*> wait_objects_;
    std::unordered_map<uint64_t, TransferPtr> transfers_;
    std::vector<std::shared_ptr<Region>> regions_;
    // Ports of closed endpoints: a peer that has not noticed must not reach a new endpoint under an old address.
    std::deque<FileDescriptor> tombstones_;
    std::vector<TransferPtr> ended_;
    uint64_t next_lane_ = 1;
    int64_t next_deadline_check_ = 0;
    Stats stats_;

    std::mutex stop_mutex_;
    bool stopped_ = false;  // under stop_mutex_
    std::atomic<bool> stopping_{false};
    std::atomic<bool> stuck_{false};
    std::promise<void> ended_thread_;
    std::thread thread_;
};

}  // namespace kvmesh::fabric

#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "fabric/message.h"
#include "fabric/rail.h"
#include "fabric/task_queue.h"

namespace kvmesh::fabric {

// NICs that are near each other, and so served by one thread.
struct NicGroup {
    std::vector<std::string> nics;  // as `Provider::find` takes them
    std::vector<int> cpus;          // to run on; empty: anywhere
};

struct EngineOptions {
    bool spin = false;     // poll without ever sleeping
    uint32_t window = 64;  // writes outstanding per peer and rail
};

// What the engine asks of the control connections. Called on the engine's thread; must not block.
struct EngineHooks {
    // A write failed: does the peer live? Answered by `confirm_alive` or `close_lane`.
    std::function<void(uint64_t lane)> on_suspect;
    // The lane's endpoint is about to be closed here; the peer must close its own before the lane is finished.
    std::function<void(uint64_t lane, Fault)> on_broken;
};

// One progress thread, which owns a group's NICs, their rails, and the parts of transfers that go over them. Everything
// else talks to it through its task queue. Nothing of Python is ever called on it.
//
// A lane is closed as a whole: what breaks one of its rails breaks the lane, here and (by the hooks) in other engines.
class Engine {
  public:
    static constexpr std::chrono::seconds kPatience{3};
    // Pinning many gigabytes takes its time.
    static constexpr std::chrono::seconds kPinPatience{120};

    // `first_nic`: the place of the group's first NIC among the fabric's.
    Engine(const Provider& provider, const NicGroup& group, size_t first_nic, EngineOptions options,
           ImmediateTable& immediates, EventQueue& events);
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

    const std::vector<std::unique_ptr<Nic>>& nics() const { return nics_; }

    // With each of the group's NICs. What throws may have done a part; `close_region` undoes it.
    void register_region(const std::shared_ptr<Region>& region);
    void close_region(const std::shared_ptr<Region>& region);

    // Opens rails: each number with its NIC's place in `nics`. What throws may have opened some; `close_lane` and
    // `finish_lane` undo it.
    std::vector<RailOffer> open_rails(uint64_t lane, std::vector<std::pair<uint32_t, size_t>> rails);
    // The rails with these numbers to those of the peer.
    void connect_rails(uint64_t lane, std::vector<std::pair<uint32_t, RailOffer>> peers);
    // Closes the endpoints: when it returns nothing of that peer can land over these NICs (unless `stuck`). Transfers
    // wait for `finish_lane`.
    void close_lane(uint64_t lane, Fault fault);
    void confirm_alive(uint64_t lane);
    void finish_lane(uint64_t lane);

    // Parts of transfers over rails of this engine, from any thread.
    void start(PartPtr part, uint32_t released_layers);
    void release(std::vector<PartPtr> parts, uint32_t layers);
    void cancel(uint64_t transfer);

    // Returns when every immediate that has arrived by now is in the table.
    void settle();

    // A snapshot, of each NIC.
    std::vector<Stats> stats();

  private:
    void run();
    bool step();
    void yield_when_blocked();
    void sleep();
    int sleep_ms() const;
    void wake();
    void finish(const PartPtr& part);
    void admit(const PartPtr& part);
    void stop_part(const PartPtr& part, Fault fault);
    void check_rails();
    void check_deadlines();
    void break_lane(uint64_t lane, Fault fault, PartPtr culprit);
    void drop_lane(uint64_t lane, const Fault& fault);
    void drop_rail(RailId id);
    void bury(const Nic& nic, const std::string& endpoint);
    void shut_down();
    Stats& stats_of(const Rail& rail) { return stats_[rail.nic().index() - first_nic_]; }

    size_t first_nic_;
    std::vector<int> cpus_;
    EngineOptions options_;
    ImmediateTable& immediates_;
    EventQueue& events_;
    EngineHooks hooks_;
    std::vector<std::unique_ptr<Nic>> nics_;
    TaskQueue tasks_;
    FileDescriptor epoll_;
    std::map<RailId, std::unique_ptr<Rail>> rails_;
    std::map<RailId, std::unique_ptr<Rail>> retired_;         // closed, not yet finished
    std::map<fid_fabric*, std::vector<fid*>> wait_objects_;   // of the rails, by the fabric that they are asked of
    std::map<std::pair<uint64_t, uint32_t>, PartPtr> parts_;  // by transfer and rail
    std::vector<std::shared_ptr<Region>> regions_;
    // Ports of closed endpoints: a peer that has not noticed must not reach a new endpoint under an old address.
    std::deque<FileDescriptor> tombstones_;
    std::vector<PartPtr> ended_;
    int64_t next_deadline_check_ = 0;
    std::vector<Stats> stats_;  // of each NIC

    std::mutex stop_mutex_;
    bool stopped_ = false;  // under stop_mutex_
    std::atomic<bool> stopping_{false};
    std::atomic<bool> stuck_{false};
    std::promise<void> ended_thread_;
    std::thread thread_;
};

}  // namespace kvmesh::fabric

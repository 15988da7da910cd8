#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "fabric/descriptor.h"
#include "fabric/event_queue.h"
#include "fabric/region.h"

namespace kvmesh::fabric {

// What to write: the run of page source_pages[i] to that of target_pages[i] in every layer, one write and one immediate
// each. Byte arithmetic as in `shared.transfer.interface.PageGeometry`.
struct WritePlan {
    std::shared_ptr<Region> source;
    RemoteRegion target;
    std::vector<uint32_t> source_pages;
    std::vector<uint32_t> target_pages;
    uint64_t run_bytes = 0;
    uint64_t source_begin = 0;  // of page 0 of the first layer in its region
    uint64_t target_begin = 0;
    uint64_t source_offset = 0;  // of the run in its page
    uint64_t target_offset = 0;
    uint64_t source_page_stride = 0;
    uint64_t target_page_stride = 0;
    uint64_t source_layer_stride = 0;
    uint64_t target_layer_stride = 0;
    uint32_t num_layers = 0;
    uint32_t immediate = 0;

    // Throws SetupError (refused) where a run would lie outside of its page or a page outside of either region.
    void validate() const;
    bool empty() const { return num_layers == 0 || source_pages.empty(); }
    uint64_t writes() const { return static_cast<uint64_t>(num_layers) * source_pages.size(); }
};

// One write of a plan.
struct PageWrite {
    std::byte* source = nullptr;
    uint64_t target = 0;
    uint64_t key = 0;
    uint32_t layer = 0;
};

class TransferPart;
using PartPtr = std::shared_ptr<TransferPart>;

// A plan on its way to a peer, shared by its parts, each of which belongs to another rail. It ends when the last part
// has: then nothing of it is outstanding on any NIC. Any thread.
class Transfer {
  public:
    Transfer(uint64_t id, uint64_t lane, WritePlan plan, int64_t deadline_ns);

    uint64_t id() const { return id_; }
    uint64_t lane() const { return lane_; }
    const WritePlan& plan() const { return plan_; }
    int64_t deadline_ns() const { return deadline_ns_; }

    // Write w goes over rail (`first_rail` + w) mod `rails`, where the writes of all layers are numbered through: each
    // layer keeps all rails busy, and so do many layers of one page. As many parts as there are rails with a write, at
    // least one. To be called once.
    static std::vector<PartPtr> spread(const std::shared_ptr<Transfer>& transfer, uint32_t first_rail, uint32_t rails);

    // A part was stopped. The first fault is the transfer's.
    void blame(const Fault& fault);
    // A part has ended; what Python hears when it was the last.
    std::optional<Event> end(const TransferPart& part);

  private:
    uint64_t id_;
    uint64_t lane_;
    WritePlan plan_;
    int64_t deadline_ns_;
    std::mutex mutex_;
    size_t parts_left_ = 0;
    Event event_;
};

// The writes of a transfer that go over one rail. After `start` it belongs to the thread of that rail's engine.
class TransferPart {
  public:
    // The writes `first`, `first` + `stride` and so on.
    TransferPart(std::shared_ptr<Transfer> transfer, uint32_t rail, uint64_t first, uint64_t stride);

    uint64_t id() const { return transfer_->id(); }
    uint64_t lane() const { return transfer_->lane(); }
    uint32_t rail() const { return rail_; }
    const WritePlan& plan() const { return transfer_->plan(); }
    int64_t deadline_ns() const { return transfer_->deadline_ns(); }

    // Lets the writes of the first `layers` layers go.
    void release(uint32_t layers);
    // The next write that may be posted; none when stopped, done, or waiting for a layer.
    std::optional<PageWrite> next() const;
    // `next` is the last one that may be posted for now.
    bool at_last() const { return next_ + stride_ >= released_; }
    void posted();
    void completed(uint32_t layer, int64_t now);
    // A posted write failed. The part then ends with its lane, not before.
    void dropped() {
        --outstanding_;
        broken_ = true;
    }

    // Posts no more and ends with `fault` once drained. The first call decides.
    void stop(Fault fault);
    bool stopped() const { return stopped_; }
    uint32_t outstanding() const { return outstanding_; }
    // Nothing is outstanding, and nothing will be posted.
    bool finished() const { return outstanding_ == 0 && !broken_ && (stopped_ || next_ >= plan().writes()); }
    // Whether it waits in its rail's queue of parts that have writes to post.
    bool queued = false;

    uint64_t writes_completed() const { return completed_; }
    const std::vector<LayerTiming>& timings() const { return timings_; }
    // What Python hears when this was the last part. Once, when it is finished or its lane is closed.
    std::optional<Event> end() { return transfer_->end(*this); }

  private:
    std::shared_ptr<Transfer> transfer_;
    uint32_t rail_;
    uint64_t stride_;
    uint64_t next_;          // the number of the next write
    uint64_t released_ = 0;  // writes below it may be posted
    uint32_t outstanding_ = 0;
    uint64_t completed_ = 0;
    bool broken_ = false;
    bool stopped_ = false;
    std::vector<LayerTiming> timings_;
};

}  // namespace kvmesh::fabric

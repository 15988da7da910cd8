#pragma once

#include <cstdint>
#include <memory>
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
};

// One write of a plan.
struct PageWrite {
    std::byte* source = nullptr;
    uint64_t target = 0;
    uint32_t layer = 0;
};

// Progress through a plan. After `start` it belongs to the engine's thread.
class Transfer {
  public:
    Transfer(uint64_t id, uint64_t lane, WritePlan plan, int64_t deadline_ns);

    uint64_t id() const { return id_; }
    uint64_t lane() const { return lane_; }
    const WritePlan& plan() const { return plan_; }
    int64_t deadline_ns() const { return deadline_ns_; }

    // Lets the writes of the first `layers` layers go.
    void release(uint32_t layers);
    // The next write that may be posted; none when stopped, done, or waiting for a layer.
    std::optional<PageWrite> next() const;
    // `next` is the last one that may be posted for now.
    bool at_last() const { return layer_ + 1 == released_ && page_ + 1 == plan_.source_pages.size(); }
    void posted();
    void completed(uint32_t layer, int64_t now);
    // A posted write failed. The transfer then ends with its lane, not before.
    void dropped() {
        --outstanding_;
        broken_ = true;
    }

    // Posts no more and ends with `fault` once drained. The first call decides.
    void stop(Fault fault);
    bool stopped() const { return fault_.status != Status::ok; }
    uint32_t outstanding() const { return outstanding_; }
    // Nothing is outstanding, and nothing will be posted.
    bool finished() const { return outstanding_ == 0 && !broken_ && (stopped() || layer_ == plan_.num_layers); }
    // Whether it waits in its lane's queue of transfers that have writes to post.
    bool queued = false;

    // What Python hears of it.
    Event event() const;

  private:
    uint64_t id_;
    uint64_t lane_;
    WritePlan plan_;
    int64_t deadline_ns_;
    uint32_t released_ = 0;  // layers
    uint32_t layer_ = 0;     // of the next write
    uint32_t page_ = 0;      // index into the page lists of the next write
    uint32_t outstanding_ = 0;
    uint64_t completed_ = 0;
    bool broken_ = false;
    std::vector<LayerTiming> timings_;
    Fault fault_{Status::ok, "", 0, ""};
};

using TransferPtr = std::shared_ptr<Transfer>;

}  // namespace kvmesh::fabric

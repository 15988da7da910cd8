#include "fabric/transfer.h"

#include <algorithm>
#include <cerrno>

namespace kvmesh::fabric {

namespace {

__extension__ using Wide = unsigned __int128;  // No sum of three 64-bit products wraps.

// One side of a plan.
struct Side {
    const char* name;
    const std::vector<uint32_t>& pages;
    uint64_t offset, page_stride, layer_stride, region_bytes;
};

void require_inside(const Side& side, uint64_t run_bytes, uint32_t layers) {
    Wide highest = *std::max_element(side.pages.begin(), side.pages.end());
    Wide run_end = Wide(side.offset) + run_bytes;
    Wide end = Wide(side.layer_stride) * (layers - 1) + highest * side.page_stride + run_end;
    if (end > side.region_bytes)
        throw SetupError({Status::refused, "write", ERANGE,
                          std::string("the write ends past its ") + side.name + " region of " +
                              std::to_string(side.region_bytes) + " bytes"});
    if (run_end > side.page_stride)
        throw SetupError({Status::refused, "write", ERANGE,
                          std::string("the run ends past its ") + side.name + " page of " +
                              std::to_string(side.page_stride) + " bytes"});
}

}  // namespace

void WritePlan::validate() const {
    if (source_pages.size() != target_pages.size())
        throw SetupError({Status::refused, "write", EINVAL, "the page lists differ in length"});
    if (empty()) return;
    require_inside({"source", source_pages, source_offset, source_page_stride, source_layer_stride, source->length()},
                   run_bytes, num_layers);
    require_inside({"target", target_pages, target_offset, target_page_stride, target_layer_stride, target.length},
                   run_bytes, num_layers);
}

Transfer::Transfer(uint64_t id, uint64_t lane, WritePlan plan, int64_t deadline_ns)
    : id_(id), lane_(lane), plan_(std::move(plan)), deadline_ns_(deadline_ns) {
    if (plan_.empty()) plan_.num_layers = 0;
    timings_.resize(plan_.num_layers);
}

void Transfer::release(uint32_t layers) { released_ = std::max(released_, std::min(layers, plan_.num_layers)); }

std::optional<PageWrite> Transfer::next() const {
    if (stopped() || layer_ >= released_) return std::nullopt;
    uint64_t source =
        layer_ * plan_.source_layer_stride + plan_.source_pages[page_] * plan_.source_page_stride + plan_.source_offset;
    uint64_t target =
        layer_ * plan_.target_layer_stride + plan_.target_pages[page_] * plan_.target_page_stride + plan_.target_offset;
    return PageWrite{plan_.source->base() + source, plan_.target.nics.front().address + target, layer_};
}

void Transfer::posted() {
    ++outstanding_;
    if (page_ == 0) timings_[layer_].posted_ns = now_ns();
    if (++page_ == plan_.source_pages.size()) {
        page_ = 0;
        ++layer_;
    }
}

void Transfer::completed(uint32_t layer, int64_t now) {
    --outstanding_;
    ++completed_;
    timings_[layer].completed_ns = now;  // The last one stays.
}

void Transfer::stop(Fault fault) {
    if (!stopped()) fault_ = std::move(fault);
}

Event Transfer::event() const {
    Event event;
    event.kind = EventKind::transfer;
    event.token = id_;
    event.lane = lane_;
    event.fault = fault_;
    event.writes = completed_;
    event.bytes = completed_ * plan_.run_bytes;
    event.layers = timings_;
    return event;
}

}  // namespace kvmesh::fabric

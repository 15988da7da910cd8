#include "fabric/transfer.h"

#include <algorithm>
#include <cerrno>

namespace kvmesh::fabric {

namespace {

__extension__ using Wide = unsigned __int128;  // No sum of three 64-bit products wraps.

Wide end_of(const std::vector<uint32_t>& pages, uint64_t offset, uint64_t stride, const WritePlan& plan) {
    uint32_t highest = *std::max_element(pages.begin(), pages.end());
    return Wide(offset) + Wide(stride) * (plan.num_layers - 1) + (Wide(highest) + 1) * plan.page_bytes;
}

void require_inside(const char* side, Wide end, uint64_t length) {
    if (end > length)
        throw SetupError(
            {Status::refused, "write", ERANGE,
             std::string("the write ends past its ") + side + " region of " + std::to_string(length) + " bytes"});
}

}  // namespace

void WritePlan::validate() const {
    if (source_pages.size() != target_pages.size())
        throw SetupError({Status::refused, "write", EINVAL, "the page lists differ in length"});
    if (empty()) return;
    require_inside("source", end_of(source_pages, source_offset, source_layer_stride, *this), source->length());
    require_inside("target", end_of(target_pages, target_offset, target_layer_stride, *this), target.length);
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
        plan_.source_offset + layer_ * plan_.source_layer_stride + plan_.source_pages[page_] * plan_.page_bytes;
    uint64_t target =
        plan_.target_offset + layer_ * plan_.target_layer_stride + plan_.target_pages[page_] * plan_.page_bytes;
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
    event.bytes = completed_ * plan_.page_bytes;
    event.layers = timings_;
    return event;
}

}  // namespace kvmesh::fabric

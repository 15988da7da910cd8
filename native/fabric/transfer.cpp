#include "fabric/transfer.h"

#include <algorithm>
#include <cerrno>

namespace kvmesh::fabric {

namespace {

__extension__ using Wide = unsigned __int128;  // No sum of some 64-bit products wraps.

// One side of a plan.
struct Side {
    const char* name;
    const std::vector<uint32_t>& pages;
    uint64_t begin, offset, page_stride, layer_stride, region_bytes;
};

void require_inside(const Side& side, uint64_t run_bytes, uint32_t layers) {
    Wide highest = *std::max_element(side.pages.begin(), side.pages.end());
    Wide run_end = Wide(side.offset) + run_bytes;
    Wide end = Wide(side.begin) + Wide(side.layer_stride) * (layers - 1) + highest * side.page_stride + run_end;
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
    require_inside({"source", source_pages, source_begin, source_offset, source_page_stride, source_layer_stride,
                    source->length()},
                   run_bytes, num_layers);
    require_inside(
        {"target", target_pages, target_begin, target_offset, target_page_stride, target_layer_stride, target.length},
        run_bytes, num_layers);
}

Transfer::Transfer(uint64_t id, uint64_t lane, WritePlan plan, int64_t deadline_ns)
    : id_(id), lane_(lane), plan_(std::move(plan)), deadline_ns_(deadline_ns) {
    if (plan_.empty()) plan_.num_layers = 0;
    event_.kind = EventKind::transfer;
    event_.token = id_;
    event_.lane = lane_;
    event_.layers.resize(plan_.num_layers);
}

std::vector<PartPtr> Transfer::spread(const std::shared_ptr<Transfer>& transfer, uint32_t first_rail, uint32_t rails) {
    uint64_t parts = std::clamp<uint64_t>(transfer->plan_.writes(), 1, rails);
    std::vector<PartPtr> spread;
    for (uint32_t i = 0; i < parts; ++i)
        spread.push_back(std::make_shared<TransferPart>(transfer, (first_rail + i) % rails, i, rails));
    transfer->parts_left_ = parts;
    return spread;
}

void Transfer::blame(const Fault& fault) {
    std::lock_guard lock(mutex_);
    if (event_.fault.status == Status::ok) event_.fault = fault;
}

std::optional<Event> Transfer::end(const TransferPart& part) {
    std::lock_guard lock(mutex_);
    event_.writes += part.writes_completed();
    for (size_t layer = 0; layer < event_.layers.size(); ++layer) {
        LayerTiming& whole = event_.layers[layer];
        const LayerTiming& its = part.timings()[layer];
        if (whole.posted_ns == 0 || (its.posted_ns != 0 && its.posted_ns < whole.posted_ns))
            whole.posted_ns = its.posted_ns;
        whole.completed_ns = std::max(whole.completed_ns, its.completed_ns);
    }
    if (--parts_left_ > 0) return std::nullopt;
    event_.bytes = event_.writes * plan_.run_bytes;
    return event_;
}

TransferPart::TransferPart(std::shared_ptr<Transfer> transfer, uint32_t rail, uint64_t first, uint64_t stride)
    : transfer_(std::move(transfer)), rail_(rail), stride_(stride), next_(first), timings_(plan().num_layers) {}

void TransferPart::release(uint32_t layers) {
    uint64_t writes = static_cast<uint64_t>(std::min(layers, plan().num_layers)) * plan().source_pages.size();
    released_ = std::max(released_, writes);
}

std::optional<PageWrite> TransferPart::next() const {
    if (stopped() || next_ >= released_) return std::nullopt;
    const WritePlan& plan = this->plan();
    uint64_t layer = next_ / plan.source_pages.size(), page = next_ % plan.source_pages.size();
    uint64_t source = plan.source_begin + layer * plan.source_layer_stride +
                      plan.source_pages[page] * plan.source_page_stride + plan.source_offset;
    uint64_t target = plan.target_begin + layer * plan.target_layer_stride +
                      plan.target_pages[page] * plan.target_page_stride + plan.target_offset;
    const NicKey& nic = plan.target.nics[rail_ % plan.target.nics.size()];
    return PageWrite{plan.source->base() + source, nic.address + target, nic.key, static_cast<uint32_t>(layer)};
}

void TransferPart::posted() {
    LayerTiming& timing = timings_[next_ / plan().source_pages.size()];
    if (timing.posted_ns == 0) timing.posted_ns = now_ns();
    ++outstanding_;
    next_ += stride_;
}

void TransferPart::completed(uint32_t layer, int64_t now) {
    --outstanding_;
    ++completed_;
    timings_[layer].completed_ns = now;  // The last one stays.
}

void TransferPart::stop(Fault fault) {
    if (stopped_) return;
    stopped_ = true;
    transfer_->blame(fault);
}

}  // namespace kvmesh::fabric

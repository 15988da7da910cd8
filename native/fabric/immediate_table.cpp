#include "fabric/immediate_table.h"

#include <cerrno>

namespace kvmesh::fabric {

namespace {

constexpr size_t kMaxUnknown = 65536;
constexpr size_t kMaxClosed = 65536;

}  // namespace

void ImmediateTable::arm(uint32_t immediate, uint64_t count, uint64_t token) {
    std::lock_guard lock(mutex_);
    Entry& entry = entries_[immediate];
    if (entry.state == State::armed)
        throw SetupError(
            {Status::failed, "expect", EBUSY, "immediate " + std::to_string(immediate) + " is armed already"});
    if (entry.state == State::unknown && entry.arrived > 0) --unknown_;
    uint64_t early = entry.state == State::unknown ? entry.arrived : 0;
    entry = {State::armed, early, count, token};
    if (entry.arrived >= entry.expected) complete(entry);
}

bool ImmediateTable::closed(uint32_t immediate) const {
    std::lock_guard lock(mutex_);
    auto found = entries_.find(immediate);
    return found != entries_.end() && found->second.state == State::closed;
}

void ImmediateTable::disarm(uint32_t immediate, uint64_t token) {
    std::lock_guard lock(mutex_);
    auto found = entries_.find(immediate);
    if (found == entries_.end() || found->second.state != State::armed || found->second.token != token) return;
    found->second = {State::closed, 0, 0, token};
    remember_closed(immediate, token);
}

void ImmediateTable::remember_closed(uint32_t immediate, uint64_t token) {
    closed_.emplace_back(immediate, token);
    if (closed_.size() <= kMaxClosed) return;
    auto [oldest, its_token] = closed_.front();
    closed_.pop_front();
    auto found = entries_.find(oldest);
    // It may have been armed again since, under another token.
    if (found != entries_.end() && found->second.state == State::closed && found->second.token == its_token)
        entries_.erase(found);
}

bool ImmediateTable::add(std::span<const uint32_t> immediates) {
    std::lock_guard lock(mutex_);
    bool sound = true;
    // The pages of one transfer arrive in a row: one look-up a run.
    for (size_t start = 0; start < immediates.size();) {
        size_t end = start + 1;
        while (end < immediates.size() && immediates[end] == immediates[start]) ++end;
        sound = count(immediates[start], end - start) && sound;
        start = end;
    }
    return sound;
}

bool ImmediateTable::count(uint32_t immediate, uint64_t times) {
    arrived_ += times;
    auto found = entries_.find(immediate);
    if (found == entries_.end()) {
        if (unknown_ >= kMaxUnknown) return false;
        found = entries_.try_emplace(immediate).first;
        ++unknown_;
    }
    Entry& entry = found->second;
    if (entry.state == State::closed) {
        late_ += times;
        return true;
    }
    uint64_t before = entry.arrived;
    entry.arrived += times;
    if (entry.state == State::armed && before < entry.expected && entry.arrived >= entry.expected) complete(entry);
    return true;
}

void ImmediateTable::complete(Entry& entry) {
    Event event;
    event.kind = EventKind::arrival;
    event.token = entry.token;
    event.writes = entry.arrived;
    events_.push(std::move(event));
}

uint64_t ImmediateTable::arrived() const {
    std::lock_guard lock(mutex_);
    return arrived_;
}

uint64_t ImmediateTable::late() const {
    std::lock_guard lock(mutex_);
    return late_;
}

}  // namespace kvmesh::fabric

#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <unordered_map>

#include "fabric/event_queue.h"

namespace kvmesh::fabric {

// Counts arrivals by immediate. An immediate is in one of these states:
//   unknown  nobody armed it yet: arrivals are kept ("early") and count when it is armed
//   armed    arrivals count; the event is pushed when the expected number is reached
//   closed   it was armed and disarmed: arrivals are late ones of a finished use and are dropped until it is armed
//   again
// The newest 65,536 closed ones are remembered, and older ones are unknown again.
class ImmediateTable {
  public:
    explicit ImmediateTable(EventQueue& events) : events_(events) {}

    // Any thread. `count` 0 completes at once. Throws SetupError when it is armed already.
    void arm(uint32_t immediate, uint64_t count, uint64_t token);
    // Whether it was armed before and arrivals with it are dropped now.
    bool closed(uint32_t immediate) const;

    // Any thread. Does nothing unless it is armed under `token`.
    void disarm(uint32_t immediate, uint64_t token);

    // The engine's thread. False: more than 65,536 different immediates wait for a counter, so a peer sends nonsense.
    bool add(std::span<const uint32_t> immediates);

    uint64_t arrived() const;
    uint64_t late() const;

  private:
    enum class State : uint8_t { unknown, armed, closed };
    struct Entry {
        State state = State::unknown;
        uint64_t arrived = 0;
        uint64_t expected = 0;
        uint64_t token = 0;
    };

    bool count(uint32_t immediate, uint64_t times);
    void complete(Entry& entry);
    void remember_closed(uint32_t immediate, uint64_t token);

    EventQueue& events_;
    mutable std::mutex mutex_;
    std::unordered_map<uint32_t, Entry> entries_;
    std::deque<std::pair<uint32_t, uint64_t>> closed_;  // (immediate, token of the use that was closed)
    size_t unknown_ = 0;
    uint64_t arrived_ = 0;
    uint64_t late_ = 0;
};

}  // namespace kvmesh::fabric

#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "fabric/fault.h"
#include "fabric/socket.h"

namespace kvmesh::fabric {

// The numbers are part of the Python face (`_native.pyi`).
enum class EventKind : uint8_t { transfer = 0, arrival = 1, connected = 2, fenced = 3, peer_lost = 4 };

// When a layer's writes were posted (first) and completed (last), CLOCK_MONOTONIC nanoseconds; 0 is never.
struct LayerTiming {
    int64_t posted_ns = 0;
    int64_t completed_ns = 0;
};

struct Event {
    EventKind kind = EventKind::transfer;
    // Of the operation that ended; for `connected` see `lane` too.
    uint64_t token = 0;
    uint64_t lane = 0;
    uint64_t peer = 0;
    Fault fault{Status::ok, "", 0, ""};
    uint64_t writes = 0;
    uint64_t bytes = 0;
    std::vector<LayerTiming> layers;
};

// What native threads tell the event loop. Bounded by what Python started: one event an operation or peer.
class EventQueue {
  public:
    EventQueue();

    // Any thread; never blocks on Python.
    void push(Event event);
    // Everything since the last call; lowers the descriptor's readiness.
    std::vector<Event> drain();
    // Readable while there are events.
    int fd() const { return wake_.get(); }

  private:
    FileDescriptor wake_;
    std::mutex mutex_;
    std::vector<Event> events_;
};

}  // namespace kvmesh::fabric

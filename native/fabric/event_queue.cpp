#include "fabric/event_queue.h"

namespace kvmesh::fabric {

EventQueue::EventQueue() : wake_(make_eventfd()) {}

void EventQueue::push(Event event) {
    bool first = false;
    {
        std::lock_guard lock(mutex_);
        first = events_.empty();
        events_.push_back(std::move(event));
    }
    if (first) raise_eventfd(wake_.get());
}

std::vector<Event> EventQueue::drain() {
    // Lowered before the events are taken: one that comes in between raises it again, and costs an empty drain.
    lower_eventfd(wake_.get());
    std::lock_guard lock(mutex_);
    return std::exchange(events_, {});
}

}  // namespace kvmesh::fabric

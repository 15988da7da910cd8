#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "fabric/control.h"
#include "fabric/watcher.h"

namespace kvmesh::fabric {

struct FabricOptions {
    std::string provider;
    std::string host;          // as peers reach it; goes into the address
    std::string numeric_host;  // what it resolves to; the control connections' listener is bound to it
    uint64_t identity = 0;
    std::vector<NicGroup> groups;
    EngineOptions engine;
};

struct FabricStats {
    std::vector<Stats> nics;
    Stats all;  // their sum
    uint64_t arrived = 0;
    uint64_t late = 0;
};

// One process's fabric: the parts, in the order in which they may be taken apart. Called by one thread, except that
// `close` may run beside an event loop that drains. A forked child gets SetupError from every call.
class Fabric {
  public:
    explicit Fabric(FabricOptions options);
    ~Fabric();

    void close();
    std::string address() const;
    int event_fd() const { return events_->fd(); }
    std::vector<Event> drain();
    FabricStats stats();
    bool stuck() const { return engines_->stuck(); }

    std::shared_ptr<Region> register_region(int fd, size_t length);
    // Whether `grant` gives keys of their own. Not where the hardware makes the keys, and pins the memory for each.
    bool grants() const { return engines_->grants(); }
    // `length` bytes from `offset` of a region, under other keys, which end with `close_region`.
    std::shared_ptr<Region> grant(const std::shared_ptr<Region>& region, size_t offset, size_t length);
    void close_region(const std::shared_ptr<Region>& region);

    // Each returns the token that its event carries.
    uint64_t connect(const std::string& address, const std::string& numeric_host, double timeout_s);
    uint64_t fence(uint64_t identity);
    uint64_t expect(uint32_t immediate, uint64_t count);
    void forget(uint32_t immediate, uint64_t token);

    // All layers now. Returns the transfer's token.
    uint64_t write(uint64_t lane, WritePlan plan, double timeout_s);
    void cancel(uint64_t transfer);

    std::shared_ptr<LayerWatcher> watch(int counter_fd, int64_t poll_ns);
    std::vector<uint64_t> arm(LayerWatcher& watcher, uint64_t first,
                              std::vector<std::tuple<uint64_t, WritePlan, double>> writes);

  private:
    void require_usable() const;
    std::vector<PartPtr> make_transfer(uint64_t lane, WritePlan plan, double timeout_s);

    FabricOptions options_;
    pid_t pid_;
    std::unique_ptr<EventQueue> events_;
    std::unique_ptr<ImmediateTable> immediates_;
    std::unique_ptr<Engines> engines_;
    std::unique_ptr<Control> control_;
    std::vector<std::weak_ptr<LayerWatcher>> watchers_;
    uint64_t next_token_ = 1;
    bool closed_ = false;
};

}  // namespace kvmesh::fabric

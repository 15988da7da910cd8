#pragma once

#include "fabric/engine.h"

namespace kvmesh::fabric {

// What a lane's peer needs to write to it: an offer a rail.
struct LaneOffer {
    uint64_t lane = 0;
    std::vector<RailOffer> rails;
};

// All engines of a fabric, one a NIC group, as one. A lane, the connection to one peer, is made of rails: as many as
// the side with more NICs has. Rail r goes from NIC r mod n of one side to NIC r mod m of the other.
//
// Everything is per lane: it is closed on all NICs before `close_lane` returns, and the loss of one rail is its loss.
class Engines {
  public:
    // Throws SetupError where a NIC cannot be opened, or there are none or too many.
    Engines(const Provider& provider, const std::vector<NicGroup>& groups, EngineOptions options,
            ImmediateTable& immediates, EventQueue& events);

    void set_hooks(const EngineHooks& hooks);
    // Ends the threads; transfers that are left end as lost. Idempotent.
    void stop();
    bool stuck() const;
    size_t nics() const { return places_.size(); }

    // `length` bytes from `offset`, registered with every NIC, or with none and it throws.
    std::shared_ptr<Region> register_region(std::shared_ptr<Mapping> mapping, size_t offset, size_t length);
    // Registering costs no more than a key: no NIC pins the memory for it.
    bool grants() const { return grants_; }
    void close_region(const std::shared_ptr<Region>& region);

    // For the control thread. `peer_nics`: how many the other side has.
    LaneOffer open_lane(size_t peer_nics);
    // Throws SetupError (refused) where the peer does not offer as many rails.
    void connect_lane(uint64_t lane, const std::vector<RailOffer>& peers);
    void close_lane(uint64_t lane, const Fault& fault);
    void confirm_alive(uint64_t lane);
    void finish_lane(uint64_t lane);

    // Its parts, the first over the rail whose NIC has been given the fewest bytes so far. One thread at a time.
    std::vector<PartPtr> spread(const std::shared_ptr<Transfer>& transfer);

    // Transfers, from any thread.
    void start(const std::vector<PartPtr>& parts, uint32_t released_layers);
    void release(const std::vector<PartPtr>& parts, uint32_t layers);
    void cancel(uint64_t transfer);
    // Whole transfers.
    void cancel(const std::vector<PartPtr>& parts);

    // Returns when every immediate that has arrived by now is in the table.
    void settle();
    // A snapshot, of each NIC.
    std::vector<Stats> stats();

  private:
    // Where a NIC is: its engine, and its place there.
    struct Place {
        size_t engine;
        size_t nic;
    };

    const Place& place_of_rail(uint32_t rail) const { return places_[rail % places_.size()]; }

    std::vector<std::unique_ptr<Engine>> engines_;
    std::vector<Place> places_;  // of each NIC
    bool grants_ = true;
    std::vector<uint64_t> given_;       // bytes, by NIC
    std::vector<uint64_t> given_rail_;  // and by rail
    // The control thread's.
    uint64_t next_lane_ = 1;
    std::map<uint64_t, std::vector<RailOffer>> peers_;  // by lane
};

}  // namespace kvmesh::fabric

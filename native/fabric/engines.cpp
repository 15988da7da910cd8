#include "fabric/engines.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvmesh::fabric {

namespace {

// A lane's number says how many rails it has, so that whoever knows the one knows the other.
constexpr uint32_t kRailBits = 8;
static_assert(kMaxNics < 1 << kRailBits);

uint32_t rails_of(uint64_t lane) { return static_cast<uint32_t>(lane & ((1U << kRailBits) - 1)); }

// A shm peer that was killed leaves 15 MB in /dev/shm. The file is of this rail only: once that is closed nobody opens
// it. Not the engine's work, for that peer may have died with a lock that the engine waits for.
void remove_shared_file(const std::string& endpoint) {
    constexpr char kScheme[] = "fi_shm://";
    if (endpoint.rfind(kScheme, 0) == 0)
        shm_unlink(("/" + std::string(endpoint.c_str() + std::strlen(kScheme))).c_str());
}

}  // namespace

Engines::Engines(const Provider& provider, const std::vector<NicGroup>& groups, EngineOptions options,
                 ImmediateTable& immediates, EventQueue& events) {
    for (const NicGroup& group : groups) {
        for (size_t nic = 0; nic < group.nics.size(); ++nic) places_.push_back({engines_.size(), nic});
        if (places_.size() > kMaxNics) break;
        size_t first = places_.size() - group.nics.size();
        engines_.push_back(std::make_unique<Engine>(provider, group, first, options, immediates, events));
        for (const auto& nic : engines_.back()->nics()) grants_ = grants_ && nic->own_keys();
    }
    if (places_.empty() || places_.size() > kMaxNics)
        throw SetupError(
            {Status::unavailable, "nics", EINVAL,
             "a fabric has 1 to " + std::to_string(kMaxNics) + " NICs, not " + std::to_string(places_.size())});
    given_.resize(places_.size());
    given_rail_.resize(kMaxNics);
}

void Engines::set_hooks(const EngineHooks& hooks) {
    for (auto& engine : engines_) engine->set_hooks(hooks);
}

void Engines::stop() {
    for (auto& engine : engines_) engine->stop();
}

bool Engines::stuck() const {
    return std::any_of(engines_.begin(), engines_.end(), [](const auto& engine) { return engine->stuck(); });
}

std::shared_ptr<Region> Engines::register_region(std::shared_ptr<Mapping> mapping, size_t offset, size_t length) {
    auto region = std::make_shared<Region>(std::move(mapping), offset, length, places_.size());
    try {
        for (auto& engine : engines_) engine->register_region(region);
    } catch (const SetupError&) {
        close_region(region);
        throw;
    }
    return region;
}

void Engines::close_region(const std::shared_ptr<Region>& region) {
    region->close();
    for (auto& engine : engines_) engine->close_region(region);
}

LaneOffer Engines::open_lane(size_t peer_nics) {
    auto count = static_cast<uint32_t>(std::max(places_.size(), peer_nics));
    LaneOffer offer{next_lane_++ << kRailBits | count, std::vector<RailOffer>(count)};
    try {
        for (size_t engine = 0; engine < engines_.size(); ++engine) {
            std::vector<std::pair<uint32_t, size_t>> rails;
            for (uint32_t rail = 0; rail < count; ++rail)
                if (place_of_rail(rail).engine == engine) rails.emplace_back(rail, place_of_rail(rail).nic);
            std::vector<RailOffer> opened = engines_[engine]->open_rails(offer.lane, rails);
            for (size_t i = 0; i < rails.size(); ++i) offer.rails[rails[i].first] = std::move(opened[i]);
        }
    } catch (const SetupError& error) {
        close_lane(offer.lane, error.fault());
        finish_lane(offer.lane);
        throw;
    }
    return offer;
}

void Engines::connect_lane(uint64_t lane, const std::vector<RailOffer>& peers) {
    if (peers.size() != rails_of(lane))
        throw SetupError({Status::refused, "connect", EINVAL,
                          "the peer offers " + std::to_string(peers.size()) + " rails where there are " +
                              std::to_string(rails_of(lane))});
    peers_[lane] = peers;
    for (size_t engine = 0; engine < engines_.size(); ++engine) {
        std::vector<std::pair<uint32_t, RailOffer>> rails;
        for (uint32_t rail = 0; rail < peers.size(); ++rail)
            if (place_of_rail(rail).engine == engine) rails.emplace_back(rail, peers[rail]);
        engines_[engine]->connect_rails(lane, std::move(rails));
    }
}

void Engines::close_lane(uint64_t lane, const Fault& fault) {
    for (auto& engine : engines_) engine->close_lane(lane, fault);
}

void Engines::confirm_alive(uint64_t lane) {
    for (auto& engine : engines_) engine->confirm_alive(lane);
}

void Engines::finish_lane(uint64_t lane) {
    for (auto& engine : engines_) engine->finish_lane(lane);
    for (const RailOffer& peer : peers_[lane]) remove_shared_file(peer.endpoint);
    peers_.erase(lane);
}

std::vector<PartPtr> Engines::spread(const std::shared_ptr<Transfer>& transfer) {
    uint32_t rails = std::max(1U, rails_of(transfer->lane()));
    auto load = [this](uint32_t rail) {
        return std::pair(given_[rail % places_.size()], given_rail_[rail % kMaxNics]);
    };
    uint32_t first = 0;
    for (uint32_t rail = 1; rail < rails; ++rail)
        if (load(rail) < load(first)) first = rail;
    std::vector<PartPtr> parts = Transfer::spread(transfer, first, rails);
    const WritePlan& plan = transfer->plan();
    for (uint64_t i = 0; i < parts.size() && i < plan.writes(); ++i) {
        uint64_t bytes = ((plan.writes() - i - 1) / rails + 1) * plan.run_bytes;
        given_[parts[i]->rail() % places_.size()] += bytes;
        given_rail_[parts[i]->rail() % kMaxNics] += bytes;
    }
    return parts;
}

void Engines::start(const std::vector<PartPtr>& parts, uint32_t released_layers) {
    for (const PartPtr& part : parts) engines_[place_of_rail(part->rail()).engine]->start(part, released_layers);
}

void Engines::release(const std::vector<PartPtr>& parts, uint32_t layers) {
    std::vector<std::vector<PartPtr>> by_engine(engines_.size());
    for (const PartPtr& part : parts) by_engine[place_of_rail(part->rail()).engine].push_back(part);
    for (size_t engine = 0; engine < engines_.size(); ++engine)
        if (!by_engine[engine].empty()) engines_[engine]->release(std::move(by_engine[engine]), layers);
}

void Engines::cancel(uint64_t transfer) {
    for (auto& engine : engines_) engine->cancel(transfer);
}

void Engines::cancel(const std::vector<PartPtr>& parts) {
    for (const PartPtr& part : parts) engines_[place_of_rail(part->rail()).engine]->cancel(part->id());
}

void Engines::settle() {
    for (auto& engine : engines_) engine->settle();
}

std::vector<Stats> Engines::stats() {
    std::vector<Stats> all;
    for (auto& engine : engines_)
        for (const Stats& one : engine->stats()) all.push_back(one);
    return all;
}

}  // namespace kvmesh::fabric

#include "fabric/engine.h"

#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

namespace kvmesh::fabric {

namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kDeadlineStep = 5 * kMs;
// How long a transfer that is over its deadline, or cancelled past it, may take to drain before its lane is closed.
constexpr int64_t kDrainGrace = 250 * kMs;
constexpr int64_t kLinger = 20'000;  // polls this long after the last event before it sleeps
constexpr size_t kTombstones = 256;

void run_on(const std::vector<int>& cpus) {
    if (cpus.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int cpu : cpus) CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // A hint: where it is not allowed, run anywhere.
}

}  // namespace

Engine::Engine(const Provider& provider, const NicGroup& group, size_t first_nic, EngineOptions options,
               ImmediateTable& immediates, EventQueue& events)
    : first_nic_(first_nic),
      cpus_(group.cpus),
      options_(options),
      immediates_(immediates),
      events_(events),
      epoll_(make_epoll()) {
    for (const std::string& name : group.nics)
        nics_.push_back(std::make_unique<Nic>(provider, name, first_nic + nics_.size()));
    stats_.resize(nics_.size());
    epoll_add(epoll_.get(), tasks_.fd(), EPOLLIN, 0);
    thread_ = std::thread([this] { run(); });
}

void Engine::stop() {
    {
        std::lock_guard lock(stop_mutex_);
        if (stopped_) return;
        stopped_ = true;
    }
    tasks_.push([this] { stopping_ = true; });
    if (ended_thread_.get_future().wait_for(kPatience) == std::future_status::ready) {
        thread_.join();
    } else {
        stuck_ = true;
        thread_.detach();
    }
}

void Engine::run() {
    pthread_setname_np(pthread_self(), "kvmesh-fabric");
    run_on(cpus_);
    int64_t last_event = now_ns();
    while (!stopping_) {
        if (step()) {
            last_event = now_ns();
        } else if (!options_.spin && now_ns() - last_event > kLinger) {
            sleep();
        }
    }
    shut_down();
    ended_thread_.set_value();
}

// One round over everything. True when anything moved.
bool Engine::step() {
    bool moved = tasks_.run();
    for (auto& [id, rail] : rails_) moved = rail->progress(immediates_, stats_of(*rail), ended_) || moved;
    for (const PartPtr& part : ended_) finish(part);
    ended_.clear();
    check_rails();
    if (!parts_.empty()) check_deadlines();
    if (!moved) yield_when_blocked();
    return moved;
}

// Room is made by the peer, which may be waiting for this core.
void Engine::yield_when_blocked() {
    bool blocked = std::any_of(rails_.begin(), rails_.end(), [](const auto& entry) { return entry.second->blocked(); });
    if (blocked) std::this_thread::yield();
}

void Engine::sleep() {
    for (auto& [fabric, objects] : wait_objects_)
        if (fi_trywait(fabric, objects.data(), static_cast<int>(objects.size())) != 0) return;
    if (!tasks_.may_sleep()) return;
    epoll_event events[16];
    int timeout = sleep_ms();
    epoll_wait(epoll_.get(), events, 16, timeout);
    wake();
}

void Engine::wake() {
    tasks_.awake();
    for (auto& [id, rail] : rails_) rail->silence();
}

// Descriptors wake the sleeper; the time-out is for deadlines, and a net under a provider's lost wake-up.
int Engine::sleep_ms() const {
    constexpr int kIdle = 1000;
    int timeout = parts_.empty() ? kIdle : static_cast<int>(kDeadlineStep / kMs);
    for (const auto& [id, rail] : rails_)
        if (rail->blocked() || (rail->outstanding() > 0 && rail->nic().provider().doorbell)) timeout = 1;
    return timeout;
}

void Engine::register_region(const std::shared_ptr<Region>& region) {
    call(
        [this, region] {
            regions_.push_back(region);
            for (const auto& nic : nics_) region->attach(*nic);
            for (auto& [id, rail] : rails_) rail->admit(*region);
        },
        kPinPatience);
}

void Engine::close_region(const std::shared_ptr<Region>& region) {
    call([this, region] {
        for (const auto& nic : nics_) region->detach(*nic);
        std::erase(regions_, region);
        for (auto& [id, rail] : rails_) rail->revoke(*region);
    });
}

std::vector<RailOffer> Engine::open_rails(uint64_t lane, std::vector<std::pair<uint32_t, size_t>> rails) {
    return call([this, lane, rails = std::move(rails)] {
        std::vector<RailOffer> offers;
        for (auto [number, nic] : rails) {
            auto rail = std::make_unique<Rail>(*nics_[nic], RailId{lane, number}, options_.window);
            for (const auto& region : regions_) rail->admit(*region);
            epoll_add(epoll_.get(), rail->wait_fd(), EPOLLIN, 0);
            if (fid* object = rail->wait_object()) wait_objects_[nics_[nic]->fabric()].push_back(object);
            offers.push_back({rail->endpoint(), rail->doorbell()});
            rails_.emplace(rail->id(), std::move(rail));
        }
        return offers;
    });
}

void Engine::connect_rails(uint64_t lane, std::vector<std::pair<uint32_t, RailOffer>> peers) {
    call([this, lane, peers = std::move(peers)] {
        for (const auto& [number, peer] : peers) {
            auto found = rails_.find({lane, number});
            if (found != rails_.end()) found->second->connect(peer.endpoint, peer.doorbell);
        }
    });
}

void Engine::close_lane(uint64_t lane, Fault fault) {
    try {
        call([this, lane, fault = std::move(fault)] { drop_lane(lane, fault); });
    } catch (const SetupError&) {
        // Stuck, or ended with all its lanes: `stuck` tells which.
    }
}

void Engine::drop_lane(uint64_t lane, const Fault& fault) {
    std::vector<RailId> rails;
    for (const auto& [id, rail] : rails_)
        if (id.lane == lane) rails.push_back(id);
    for (RailId id : rails) drop_rail(id);
    for (auto& [id, part] : parts_)
        if (part->lane() == lane) part->stop(fault);
}

void Engine::drop_rail(RailId id) {
    auto found = rails_.find(id);
    const Nic& nic = found->second->nic();
    std::string endpoint = found->second->endpoint();
    if (fid* object = found->second->wait_object()) {
        std::erase(wait_objects_[nic.fabric()], object);
        if (wait_objects_[nic.fabric()].empty()) wait_objects_.erase(nic.fabric());
    }
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second->wait_fd(), nullptr);
    // With shm it is this side's progress that moves a peer's data, so that a rail that makes none is closed already.
    // Its memory goes later: an endpoint of the same process may still use it, and a stopped peer may hold its lock.
    if (nic.provider().doorbell)
        retired_.insert(rails_.extract(found));
    else
        rails_.erase(found);
    bury(nic, endpoint);
}

void Engine::bury(const Nic& nic, const std::string& endpoint) {
    sockaddr family{};
    std::memcpy(&family, endpoint.data(), std::min(endpoint.size(), sizeof family));
    const std::string& name = nic.provider().libfabric_name;
    bool by_port = (name.rfind("tcp", 0) == 0 || name.rfind("net", 0) == 0) &&
                   (family.sa_family == AF_INET || family.sa_family == AF_INET6);
    if (!by_port) return;
    SocketAddress address;
    address.length = static_cast<socklen_t>(std::min(endpoint.size(), sizeof address.storage));
    std::memcpy(&address.storage, endpoint.data(), address.length);
    if (FileDescriptor tombstone = occupy(address)) tombstones_.push_back(std::move(tombstone));
    if (tombstones_.size() > kTombstones) tombstones_.pop_front();
}

void Engine::finish_lane(uint64_t lane) {
    post([this, lane] {
        std::erase_if(retired_, [lane](const auto& entry) { return entry.first.lane == lane; });
        std::vector<PartPtr> over;
        for (auto& [id, part] : parts_)
            if (part->lane() == lane) over.push_back(part);
        for (const PartPtr& part : over) {
            part->stop({Status::peer_lost, "lane", 0, "the connection to the peer is closed"});
            finish(part);
        }
    });
}

void Engine::confirm_alive(uint64_t lane) {
    post([this, lane] {
        auto found = std::find_if(rails_.begin(), rails_.end(), [lane](const auto& entry) {
            return entry.first.lane == lane && entry.second->fault();
        });
        if (found != rails_.end()) break_lane(lane, *found->second->fault(), found->second->culprit());
    });
}

void Engine::check_rails() {
    for (auto& [id, rail] : rails_) {
        if (!rail->fault() || rail->suspected) continue;
        rail->suspected = true;
        if (hooks_.on_suspect) hooks_.on_suspect(id.lane);
    }
}

// The peer lives and the connection is unusable: the culprit was refused, and everything else is lost with the lane.
void Engine::break_lane(uint64_t lane, Fault fault, PartPtr culprit) {
    if (culprit != nullptr && fault.status == Status::refused) {
        Fault refused = fault;
        refused.text = "the peer refused the write (bad key or out of range), or the data connection broke";
        culprit->stop(std::move(refused));
    }
    fault.status = Status::peer_lost;
    fault.text = "the data connection to the peer broke: " + fault.text;
    // First the message, then the close: the peer may ask as soon as it sees the close.
    if (hooks_.on_broken) hooks_.on_broken(lane, fault);
    drop_lane(lane, fault);
}

void Engine::start(PartPtr part, uint32_t released_layers) {
    post([this, part = std::move(part), released_layers] {
        part->release(released_layers);
        admit(part);
    });
}

void Engine::admit(const PartPtr& part) {
    if (part->finished()) return finish(part);
    auto rail = rails_.find({part->lane(), part->rail()});
    if (rail == rails_.end()) {
        part->stop({Status::peer_lost, "lane", 0, "the connection to the peer is closed"});
        return finish(part);
    }
    parts_.emplace(std::pair(part->id(), part->rail()), part);
    if (part->next()) rail->second->enqueue(part);
}

void Engine::release(std::vector<PartPtr> parts, uint32_t layers) {
    post([this, parts = std::move(parts), layers] {
        for (const PartPtr& part : parts) {
            part->release(layers);
            auto rail = rails_.find({part->lane(), part->rail()});
            if (rail != rails_.end() && part->next()) rail->second->enqueue(part);
        }
    });
}

void Engine::cancel(uint64_t transfer) {
    post([this, transfer] {
        std::vector<PartPtr> parts;
        for (auto found = parts_.lower_bound({transfer, 0}); found != parts_.end() && found->first.first == transfer;)
            parts.push_back((found++)->second);
        for (const PartPtr& part : parts)
            stop_part(part, {Status::cancelled, "cancel", 0, "the transfer was cancelled"});
    });
}

void Engine::stop_part(const PartPtr& part, Fault fault) {
    part->stop(std::move(fault));
    if (part->finished()) finish(part);
}

void Engine::finish(const PartPtr& part) {
    PartPtr kept = part;
    parts_.erase({kept->id(), kept->rail()});
    if (std::optional<Event> event = kept->end()) events_.push(std::move(*event));
}

void Engine::check_deadlines() {
    int64_t now = now_ns();
    if (now < next_deadline_check_) return;
    next_deadline_check_ = now + kDeadlineStep;
    std::vector<PartPtr> late;
    for (auto& [id, part] : parts_)
        if (now > part->deadline_ns()) late.push_back(part);
    for (const PartPtr& part : late) {
        stop_part(part, {Status::timed_out, "deadline", 0, "the transfer was not complete by its deadline"});
        bool stuck = now > part->deadline_ns() + kDrainGrace && rails_.contains({part->lane(), part->rail()});
        // Posted writes cannot be taken back, so only closing the lane makes sure that none lands later.
        if (!part->finished() && stuck)
            break_lane(part->lane(), {Status::peer_lost, "deadline", 0, "a write was not complete by its deadline"},
                       nullptr);
    }
}

void Engine::shut_down() {
    tasks_.run();
    Fault closed{Status::peer_lost, "close", 0, "the fabric was closed"};
    while (!rails_.empty()) drop_lane(rails_.begin()->first.lane, closed);
    retired_.clear();
    std::vector<PartPtr> left;
    for (auto& [id, part] : parts_) left.push_back(part);
    for (const PartPtr& part : left) {
        part->stop(closed);
        finish(part);
    }
    for (const auto& region : regions_) {
        region->close();
        for (const auto& nic : nics_) region->detach(*nic);
    }
    regions_.clear();
}

void Engine::settle() {
    call([this] {
        for (auto& [id, rail] : rails_) rail->settle(immediates_, stats_of(*rail), ended_);
    });
}

std::vector<Stats> Engine::stats() {
    return call([this] { return stats_; });
}

}  // namespace kvmesh::fabric

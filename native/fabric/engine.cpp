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

Engine::Engine(Provider provider, const std::string& host, EngineOptions options, ImmediateTable& immediates,
               EventQueue& events)
    : options_(std::move(options)),
      immediates_(immediates),
      events_(events),
      nic_(std::move(provider), host),
      epoll_(make_epoll()) {
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
    run_on(options_.cpus);
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
    for (auto& [id, lane] : lanes_) moved = lane->progress(immediates_, stats_, ended_) || moved;
    for (const TransferPtr& transfer : ended_) finish(transfer);
    ended_.clear();
    check_lanes();
    if (!transfers_.empty()) check_deadlines();
    if (!moved) yield_when_blocked();
    return moved;
}

// Room is made by the peer, which may be waiting for this core.
void Engine::yield_when_blocked() {
    bool blocked = std::any_of(lanes_.begin(), lanes_.end(), [](const auto& entry) { return entry.second->blocked(); });
    if (blocked) std::this_thread::yield();
}

void Engine::sleep() {
    if (!wait_objects_.empty() &&
        fi_trywait(nic_.fabric(), wait_objects_.data(), static_cast<int>(wait_objects_.size())) != 0)
        return;
    if (!tasks_.may_sleep()) return;
    epoll_event events[16];
    int timeout = sleep_ms();
    epoll_wait(epoll_.get(), events, 16, timeout);
    wake();
}

void Engine::wake() {
    tasks_.awake();
    for (auto& [id, lane] : lanes_) lane->silence();
}

// Descriptors wake the sleeper; the time-out is for deadlines, and a net under a provider's lost wake-up.
int Engine::sleep_ms() const {
    constexpr int kIdle = 1000;
    int timeout = transfers_.empty() ? kIdle : static_cast<int>(kDeadlineStep / kMs);
    for (const auto& [id, lane] : lanes_)
        if (lane->blocked() || (lane->outstanding() > 0 && nic_.provider().doorbell)) timeout = 1;
    return timeout;
}

std::shared_ptr<Region> Engine::register_region(std::shared_ptr<Mapping> mapping) {
    return call(
        [this, mapping] {
            auto region = std::make_shared<Region>(nic_, mapping);
            for (auto& [id, lane] : lanes_) lane->admit(*region);
            regions_.push_back(region);
            return region;
        },
        kPinPatience);
}

void Engine::close_region(const std::shared_ptr<Region>& region) {
    call([this, region] {
        region->close();
        std::erase(regions_, region);
        for (auto& [id, lane] : lanes_) lane->revoke(*region);
    });
}

LaneOffer Engine::open_lane() {
    return call([this] {
        auto lane = std::make_unique<Lane>(nic_, next_lane_++, options_.window);
        for (const auto& region : regions_) lane->admit(*region);
        epoll_add(epoll_.get(), lane->wait_fd(), EPOLLIN, lane->id());
        if (fid* object = lane->wait_object()) wait_objects_.push_back(object);
        LaneOffer offer{lane->id(), lane->endpoint(), lane->doorbell()};
        lanes_.emplace(lane->id(), std::move(lane));
        return offer;
    });
}

void Engine::connect_lane(uint64_t lane, const std::string& endpoint, const std::string& doorbell) {
    call([this, lane, endpoint, doorbell] {
        auto found = lanes_.find(lane);
        if (found != lanes_.end()) found->second->connect(endpoint, doorbell);
    });
}

void Engine::close_lane(uint64_t lane, Fault fault) {
    try {
        call([this, lane, fault = std::move(fault)] { drop_lane(lane, fault); });
    } catch (const SetupError&) {
        // Stuck, or ended with all its lanes: `stuck` tells which.
    }
}

void Engine::drop_lane(uint64_t id, const Fault& fault) {
    auto found = lanes_.find(id);
    if (found == lanes_.end()) return;
    std::string endpoint = found->second->endpoint();
    if (fid* object = found->second->wait_object()) std::erase(wait_objects_, object);
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second->wait_fd(), nullptr);
    // With shm it is this side's progress that moves a peer's data, so that a lane that makes none is closed already.
    // Its memory goes later: an endpoint of the same process may still use it, and a stopped peer may hold its lock.
    if (nic_.provider().doorbell)
        retired_.insert(lanes_.extract(found));
    else
        lanes_.erase(found);
    for (auto& [transfer_id, transfer] : transfers_)
        if (transfer->lane() == id) transfer->stop(fault);
    sockaddr family{};
    std::memcpy(&family, endpoint.data(), std::min(endpoint.size(), sizeof family));
    const std::string& name = nic_.provider().libfabric_name;
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
        retired_.erase(lane);
        std::vector<TransferPtr> over;
        for (auto& [id, transfer] : transfers_)
            if (transfer->lane() == lane) over.push_back(transfer);
        for (const TransferPtr& transfer : over) {
            transfer->stop({Status::peer_lost, "lane", 0, "the connection to the peer is closed"});
            finish(transfer);
        }
    });
}

void Engine::confirm_alive(uint64_t lane) {
    post([this, lane] {
        auto found = lanes_.find(lane);
        if (found == lanes_.end() || !found->second->fault()) return;
        break_lane(lane, *found->second->fault(), found->second->culprit());
    });
}

void Engine::check_lanes() {
    for (auto& [id, lane] : lanes_) {
        if (!lane->fault() || lane->suspected) continue;
        lane->suspected = true;
        if (hooks_.on_suspect) hooks_.on_suspect(id);
    }
}

// The peer lives and the connection is unusable: the culprit was refused, and everything else is lost with the lane.
void Engine::break_lane(uint64_t lane, Fault fault, TransferPtr culprit) {
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

void Engine::start(TransferPtr transfer, uint32_t released_layers) {
    post([this, transfer = std::move(transfer), released_layers] {
        transfer->release(released_layers);
        admit(transfer);
    });
}

void Engine::admit(const TransferPtr& transfer) {
    if (transfer->finished()) return finish(transfer);
    auto lane = lanes_.find(transfer->lane());
    if (lane == lanes_.end()) {
        transfer->stop({Status::peer_lost, "lane", 0, "the connection to the peer is closed"});
        return finish(transfer);
    }
    transfers_.emplace(transfer->id(), transfer);
    if (transfer->next()) lane->second->enqueue(transfer);
}

void Engine::release(std::vector<TransferPtr> transfers, uint32_t layers) {
    post([this, transfers = std::move(transfers), layers] {
        for (const TransferPtr& transfer : transfers) {
            transfer->release(layers);
            auto lane = lanes_.find(transfer->lane());
            if (lane != lanes_.end() && transfer->next()) lane->second->enqueue(transfer);
        }
    });
}

void Engine::cancel(uint64_t id) {
    post([this, id] {
        auto found = transfers_.find(id);
        if (found == transfers_.end()) return;
        stop_transfer(TransferPtr(found->second), {Status::cancelled, "cancel", 0, "the transfer was cancelled"});
    });
}

void Engine::cancel(std::vector<TransferPtr> transfers) {
    for (const TransferPtr& transfer : transfers) cancel(transfer->id());
}

void Engine::stop_transfer(const TransferPtr& transfer, Fault fault) {
    transfer->stop(std::move(fault));
    if (transfer->finished()) finish(transfer);
}

void Engine::finish(const TransferPtr& transfer) {
    TransferPtr kept = transfer;
    transfers_.erase(kept->id());
    events_.push(kept->event());
}

void Engine::check_deadlines() {
    int64_t now = now_ns();
    if (now < next_deadline_check_) return;
    next_deadline_check_ = now + kDeadlineStep;
    std::vector<TransferPtr> late;
    for (auto& [id, transfer] : transfers_)
        if (now > transfer->deadline_ns()) late.push_back(transfer);
    for (const TransferPtr& transfer : late) {
        stop_transfer(transfer, {Status::timed_out, "deadline", 0, "the transfer was not complete by its deadline"});
        bool stuck = now > transfer->deadline_ns() + kDrainGrace && lanes_.contains(transfer->lane());
        // Posted writes cannot be taken back, so only closing the lane makes sure that none lands later.
        if (!transfer->finished() && stuck)
            break_lane(transfer->lane(), {Status::peer_lost, "deadline", 0, "a write was not complete by its deadline"},
                       nullptr);
    }
}

void Engine::shut_down() {
    tasks_.run();
    Fault closed{Status::peer_lost, "close", 0, "the fabric was closed"};
    while (!lanes_.empty()) drop_lane(lanes_.begin()->first, closed);
    retired_.clear();
    std::vector<TransferPtr> left;
    for (auto& [id, transfer] : transfers_) left.push_back(transfer);
    for (const TransferPtr& transfer : left) {
        transfer->stop(closed);
        finish(transfer);
    }
    for (const auto& region : regions_) region->close();
    regions_.clear();
}

void Engine::settle() {
    call([this] {
        for (auto& [id, lane] : lanes_) lane->settle(immediates_, stats_, ended_);
    });
}

Stats Engine::stats() {
    return call([this] { return stats_; });
}

}  // namespace kvmesh::fabric

#include "fabric/fabric.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>

namespace kvmesh::fabric {

namespace {

// Longer than any process lives, and far from where nanoseconds overflow.
constexpr double kMaxTimeout = 1e8;

int64_t to_ns(double seconds) {
    if (std::isnan(seconds) || seconds < 0)
        throw SetupError({Status::failed, "timeout_s", EINVAL, "a time-out below 0"});
    return static_cast<int64_t>(std::min(seconds, kMaxTimeout) * 1e9);
}

}  // namespace

Fabric::Fabric(FabricOptions options)
    : options_(std::move(options)),
      pid_(getpid()),
      events_(std::make_unique<EventQueue>()),
      immediates_(std::make_unique<ImmediateTable>(*events_)) {
    engines_ = std::make_unique<Engines>(Provider::named(options_.provider), options_.groups, options_.engine,
                                         *immediates_, *events_);
    control_ = std::make_unique<Control>(
        ControlOptions{options_.provider, options_.host, options_.numeric_host, options_.identity}, *engines_,
        *events_);
}

Fabric::~Fabric() {
    if (getpid() == pid_) {
        close();
        if (!engines_->stuck()) return;
    }
    // In a forked child the threads do not exist and the provider's state is the parent's; a stuck engine's thread
    // still uses its own. Leave all of it alone.
    (void)events_.release();
    (void)immediates_.release();
    (void)engines_.release();
    (void)control_.release();
}

void Fabric::require_usable() const {
    if (getpid() != pid_) throw SetupError({Status::unavailable, "fork", 0, "a forked child must not use the fabric"});
    if (closed_) throw SetupError({Status::unavailable, "close", 0, "the fabric is closed"});
}

void Fabric::close() {
    if (closed_ || getpid() != pid_) return;
    closed_ = true;
    for (const auto& weak : watchers_)
        if (std::shared_ptr<LayerWatcher> watcher = weak.lock()) watcher->close();
    control_->stop();
    engines_->stop();
}

std::string Fabric::address() const { return control_->address().encode(); }

std::vector<Event> Fabric::drain() {
    if (getpid() != pid_) throw SetupError({Status::unavailable, "fork", 0, "a forked child must not use the fabric"});
    return events_->drain();
}

FabricStats Fabric::stats() {
    require_usable();
    FabricStats stats{engines_->stats(), {}, immediates_->arrived(), immediates_->late()};
    for (const Stats& nic : stats.nics) {
        stats.all.posted += nic.posted;
        stats.all.completed += nic.completed;
        stats.all.bytes += nic.bytes;
        stats.all.retries += nic.retries;
    }
    return stats;
}

std::shared_ptr<Region> Fabric::register_region(int fd, size_t length) {
    require_usable();
    return engines_->register_region(std::make_shared<Mapping>(fd, length), 0, length);
}

std::shared_ptr<Region> Fabric::grant(const std::shared_ptr<Region>& region, size_t offset, size_t length) {
    require_usable();
    return engines_->register_region(region->mapping(), offset, length);
}

void Fabric::close_region(const std::shared_ptr<Region>& region) {
    if (closed_ || getpid() != pid_) return;  // Closed with the fabric.
    engines_->close_region(region);
}

uint64_t Fabric::connect(const std::string& address, const std::string& numeric_host, double timeout_s) {
    require_usable();
    PeerAddress peer = PeerAddress::decode(address);
    if (peer.provider != options_.provider)
        throw SetupError({Status::unreachable, "connect", 0,
                          "the peer has provider " + peer.provider + ", this side has " + options_.provider});
    if (peer.identity == options_.identity)
        throw SetupError({Status::unreachable, "connect", 0, "the address is this fabric's own"});
    uint64_t token = next_token_++;
    control_->connect(token, std::move(peer), numeric_host, to_ns(timeout_s));
    return token;
}

uint64_t Fabric::fence(uint64_t identity) {
    require_usable();
    uint64_t token = next_token_++;
    control_->fence(token, identity);
    return token;
}

uint64_t Fabric::expect(uint32_t immediate, uint64_t count) {
    require_usable();
    // The last writes of its earlier use have completed, but their immediates may still be on the way from the
    // completion queue to the table, where they must not be counted for this use.
    if (immediates_->closed(immediate)) engines_->settle();
    uint64_t token = next_token_++;
    immediates_->arm(immediate, count, token);
    return token;
}

void Fabric::forget(uint32_t immediate, uint64_t token) {
    if (getpid() == pid_) immediates_->disarm(immediate, token);
}

std::vector<PartPtr> Fabric::make_transfer(uint64_t lane, WritePlan plan, double timeout_s) {
    plan.validate();
    int64_t deadline = now_ns() + to_ns(timeout_s);
    return engines_->spread(std::make_shared<Transfer>(next_token_++, lane, std::move(plan), deadline));
}

uint64_t Fabric::write(uint64_t lane, WritePlan plan, double timeout_s) {
    require_usable();
    std::vector<PartPtr> parts = make_transfer(lane, std::move(plan), timeout_s);
    uint64_t token = parts.front()->id();
    engines_->start(parts, parts.front()->plan().num_layers);
    return token;
}

void Fabric::cancel(uint64_t transfer) {
    if (!closed_ && getpid() == pid_) engines_->cancel(transfer);
}

std::shared_ptr<LayerWatcher> Fabric::watch(int counter_fd, int64_t poll_ns) {
    require_usable();
    std::erase_if(watchers_, [](const auto& watcher) { return watcher.expired(); });
    auto watcher = std::make_shared<LayerWatcher>(counter_fd, *engines_, poll_ns);
    watchers_.push_back(watcher);
    return watcher;
}

std::vector<uint64_t> Fabric::arm(LayerWatcher& watcher, uint64_t first,
                                  std::vector<std::tuple<uint64_t, WritePlan, double>> writes) {
    require_usable();
    // All are checked before the first is started.
    std::vector<PartPtr> parts;
    std::vector<uint64_t> tokens;
    for (auto& [lane, plan, timeout_s] : writes) {
        for (PartPtr& part : make_transfer(lane, std::move(plan), timeout_s)) parts.push_back(std::move(part));
        tokens.push_back(parts.back()->id());
    }
    watcher.arm(first, std::move(parts));
    return tokens;
}

}  // namespace kvmesh::fabric

#include "fabric/rail.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "fabric/fault.h"

namespace kvmesh::fabric {

namespace {

constexpr size_t kReadBatch = 64;
constexpr size_t kReadRounds = 4;  // batches read before it is posting's turn again
constexpr size_t kQueueEntries = 4096;

bool stream_broke(int error) { return error == FI_ECANCELED || error == FI_ENOTCONN || error == FI_ECONNRESET; }

// 1.17's net waits on an epoll set of two: the sockets' own epoll set, and a signal that is raised with every
// completion and that its fi_trywait forgets to lower, so that a sleeper would never sleep again. Completions come from
// our own polling here and need no signal: the sockets' set is the one to wait on.
std::optional<int> nested_epoll(int epoll) {
    std::ifstream info("/proc/self/fdinfo/" + std::to_string(epoll));
    std::string word;
    while (info >> word) {
        int fd = -1;
        if (word != "tfd:" || !(info >> fd)) continue;
        char target[64] = "";
        ssize_t length = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), target, sizeof target - 1);
        if (length > 0 && std::string_view(target, static_cast<size_t>(length)).ends_with("[eventpoll]")) return fd;
    }
    return std::nullopt;
}

}  // namespace

Rail::Rail(const Nic& nic, RailId id, uint32_t window)
    : nic_(nic),
      id_(id),
      own_domain_(nic.own_keys() ? nic.open_domain() : nullptr),
      domain_(own_domain_ ? own_domain_.get() : nic.shared_domain()),
      slots_(window) {
    if (nic.provider().doorbell) doorbell_.emplace();
    for (Slot& slot : slots_) free_.push_back(&slot);
    open_queue();
    open_endpoint();
}

// Endpoint, then what it is bound to.
Rail::~Rail() {
    endpoint_object_.reset();
    addresses_.reset();
    queue_.reset();
    registrations_.clear();
    own_domain_.reset();
}

void Rail::open_queue() {
    fi_cq_attr attributes{};
    attributes.size = kQueueEntries;
    attributes.format = FI_CQ_FORMAT_DATA;
    attributes.wait_obj = doorbell_ ? FI_WAIT_NONE : FI_WAIT_FD;
    fid_cq* queue = nullptr;
    check("fi_cq_open", fi_cq_open(domain_, &attributes, &queue, nullptr));
    queue_.reset(queue);
    fi_av_attr table{};
    table.type = FI_AV_TABLE;
    table.count = 1;
    fid_av* addresses = nullptr;
    check("fi_av_open", fi_av_open(domain_, &table, &addresses, nullptr));
    addresses_.reset(addresses);
}

void Rail::open_endpoint() {
    fid_ep* endpoint = nullptr;
    check("fi_endpoint", fi_endpoint(domain_, nic_.info(), &endpoint, nullptr));
    endpoint_object_.reset(endpoint);
    check("fi_ep_bind", fi_ep_bind(endpoint, &queue_->fid, FI_TRANSMIT | FI_RECV));
    check("fi_ep_bind", fi_ep_bind(endpoint, &addresses_->fid, 0));
    check("fi_enable", fi_enable(endpoint));
    size_t length = 0;
    fi_getname(&endpoint->fid, nullptr, &length);
    endpoint_.resize(length);
    check("fi_getname", fi_getname(&endpoint->fid, endpoint_.data(), &length));
}

void Rail::connect(const std::string& endpoint, const std::string& doorbell) {
    // The provider takes it as an address of its own kind, without looking.
    const std::string& name = nic_.provider().libfabric_name;
    bool sockets = name.rfind("tcp", 0) == 0 || name.rfind("net", 0) == 0;
    bool like_ours = doorbell_ || endpoint.size() == endpoint_.size();
    if (like_ours && sockets) like_ours = std::memcmp(endpoint.data(), endpoint_.data(), sizeof(sa_family_t)) == 0;
    if (!like_ours)
        throw SetupError({Status::refused, "connect", EINVAL, "the peer's endpoint is no address of " + name});
    peer_doorbell_ = doorbell;
    int inserted = fi_av_insert(addresses_.get(), endpoint.data(), 1, &peer_, 0, nullptr);
    if (inserted != 1) throw SetupError(libfabric_fault("fi_av_insert", inserted < 0 ? inserted : -FI_EINVAL));
}

void Rail::admit(const Region& region) {
    if (!own_domain_) return;
    FidPtr<fid_mr> registration =
        nic_.register_memory(domain_, region.base(), region.length(), region.key(nic_.index()));
    registrations_.emplace(&region, std::move(registration));
}

void Rail::revoke(const Region& region) {
    registrations_.erase(&region);
    if (std::find(retained_.begin(), retained_.end(), region.mapping()) == retained_.end())
        retained_.push_back(region.mapping());
}

void* Rail::local_descriptor(const Region& region) const {
    if (!nic_.has(FI_MR_LOCAL)) return nullptr;
    if (!own_domain_) return region.local_descriptor(nic_.index());
    auto found = registrations_.find(&region);
    return found == registrations_.end() ? nullptr : fi_mr_desc(found->second.get());
}

int Rail::wait_fd() const {
    if (doorbell_) return doorbell_->fd();
    int fd = -1;
    check("fi_control", fi_control(&queue_->fid, FI_GETWAIT, &fd));
    return nic_.provider().libfabric_name == "net" ? nested_epoll(fd).value_or(fd) : fd;
}

void Rail::silence() {
    if (doorbell_) doorbell_->silence();
}

void Rail::enqueue(const PartPtr& part) {
    if (part->queued) return;
    part->queued = true;
    runnable_.push_back(part);
}

bool Rail::progress(ImmediateTable& immediates, Stats& stats, std::vector<PartPtr>& ended) {
    bool moved = read(immediates, stats, ended);
    if (!fault_) moved = post(stats, ended) || moved;
    if (!fault_) moved = post_confirmation() || moved;
    // Once for the whole batch: it answers the peer's writes, and announces ours.
    // A post that found no room rings too: the peer makes room, and with some providers answers the first contact.
    if ((moved || blocked_) && doorbell_ && !peer_doorbell_.empty()) doorbell_->ring(peer_doorbell_);
    return moved;
}

void Rail::settle(ImmediateTable& immediates, Stats& stats, std::vector<PartPtr>& ended) {
    // More than the queue holds was not there at the start.
    for (size_t taken = 0; taken < 2 * kQueueEntries; taken += kReadBatch * kReadRounds)
        if (!read(immediates, stats, ended)) return;
}

bool Rail::read(ImmediateTable& immediates, Stats& stats, std::vector<PartPtr>& ended) {
    std::array<fi_cq_data_entry, kReadBatch> entries;
    bool moved = false;
    for (size_t round = 0; round < kReadRounds; ++round) {
        ssize_t count = fi_cq_read(queue_.get(), entries.data(), entries.size());
        if (count == -FI_EAVAIL) {
            take_error();
            moved = true;
            continue;
        }
        if (count <= 0) {
            if (count != 0 && count != -FI_EAGAIN && !fault_) fail(libfabric_fault("fi_cq_read", count));
            break;
        }
        moved = true;
        int64_t now = now_ns();
        uint32_t before = outstanding_;
        for (ssize_t i = 0; i < count; ++i) take_completion(entries[i], now, ended);
        stats.completed += before - outstanding_;
        if (count < static_cast<ssize_t>(entries.size())) break;
    }
    if (!arrived_.empty()) {
        if (!immediates.add(arrived_) && !fault_)
            fail({Status::failed, "immediates", 0, "the peer sends immediates that nobody expects"});
        arrived_.clear();
    }
    return moved;
}

void Rail::take_completion(const fi_cq_data_entry& entry, int64_t now, std::vector<PartPtr>& ended) {
    if (entry.flags & FI_REMOTE_CQ_DATA) {
        arrived_.push_back(static_cast<uint32_t>(entry.data));
        return;
    }
    if (entry.op_context == &confirmation_) return confirm(std::exchange(confirmation_asks_, 0), now, ended);
    Slot* slot = slot_of(entry.op_context);
    if (slot == nullptr) return;
    if (slot->confirms) {
        confirm(slot->sequence, now, ended);
        complete(*slot, now, ended);
    } else if (slot->sequence < confirmed_) {
        complete(*slot, now, ended);
    } else {
        unconfirmed_.push_back(slot);
    }
}

void Rail::confirm(uint64_t sequence, int64_t now, std::vector<PartPtr>& ended) {
    confirmed_ = std::max(confirmed_, sequence);
    // Once something has failed nothing is known of those before it.
    while (!fault_ && !unconfirmed_.empty() && unconfirmed_.front()->sequence < confirmed_) {
        complete(*unconfirmed_.front(), now, ended);
        unconfirmed_.pop_front();
    }
}

void Rail::complete(Slot& slot, int64_t now, std::vector<PartPtr>& ended) {
    uint32_t layer = slot.layer;
    PartPtr part = free_slot(slot);
    part->completed(layer, now);
    if (part->finished()) ended.push_back(std::move(part));
}

void Rail::take_error() {
    fi_cq_err_entry error{};
    if (fi_cq_readerr(queue_.get(), &error, 0) < 0) return;
    Slot* slot = slot_of(error.op_context);
    // Without a context it is about something the peer did, and the control connection will tell.
    if (slot == nullptr && error.op_context == &confirmation_ && !fault_)
        fail(libfabric_fault("fi_writemsg", error.err, Status::refused));
    if (slot == nullptr) return;
    if (!fault_) {
        fail(libfabric_fault("fi_writemsg", error.err, Status::refused));
        if (!stream_broke(error.err)) culprit_ = slot->part;
    }
    if (slot->sequence <= failed_sequence_) {
        failed_sequence_ = slot->sequence;
        failed_ = slot->part;
    }
    free_slot(*slot)->dropped();
}

bool Rail::post(Stats& stats, std::vector<PartPtr>& ended) {
    bool moved = false;
    blocked_ = false;
    while (!runnable_.empty() && !free_.empty()) {
        PartPtr& part = runnable_.front();
        std::optional<PageWrite> write = part->next();
        if (write && !part->plan().source->open()) {
            part->stop({Status::failed, "write", 0, "the source region was closed"});
            if (part->finished()) ended.push_back(part);
            write.reset();
        }
        if (!write) {
            part->queued = false;
            runnable_.pop_front();
            continue;
        }
        Slot& slot = *free_.back();
        bool nothing_follows = free_.size() == 1 || (part->at_last() && runnable_.size() == 1);
        slot.confirms = nothing_follows || sequence_ - asked_ >= nic_.provider().confirm_every();
        long result = post_one(slot, *part, *write);
        if (result == -FI_EAGAIN) {
            ++stats.retries;
            blocked_ = true;
            break;
        }
        if (result != 0) {
            fail(libfabric_fault("fi_writemsg", result, Status::refused));
            return true;
        }
        free_.pop_back();
        slot.part = part;
        slot.layer = write->layer;
        slot.sequence = sequence_++;
        if (slot.confirms) asked_ = slot.sequence;
        ++outstanding_;
        ++stats.posted;
        stats.bytes += part->plan().run_bytes;
        part->posted();
        moved = true;
    }
    return moved;
}

long Rail::post_one(Slot& slot, const TransferPart& part, const PageWrite& write) {
    const WritePlan& plan = part.plan();
    iovec local{write.source, plan.run_bytes};
    void* descriptor = local_descriptor(*plan.source);
    fi_rma_iov remote{write.target, plan.run_bytes, write.key};
    // An immediate alone names no memory, so that no key is needed and no range can be wrong.
    size_t pieces = plan.run_bytes > 0 ? 1 : 0;
    fi_msg_rma message{};
    message.msg_iov = &local;
    message.desc = &descriptor;
    message.iov_count = pieces;
    message.addr = peer_;
    message.rma_iov = &remote;
    message.rma_iov_count = pieces;
    message.context = &slot.context;
    message.data = plan.immediate;
    uint64_t flags = slot.confirms ? nic_.provider().completion_flags(plan.run_bytes) : 0;
    return fi_writemsg(endpoint_object_.get(), &message, FI_REMOTE_CQ_DATA | FI_COMPLETION | flags);
}

// For writes after which nothing was posted that asks, because their transfer was stopped: an empty write without an
// immediate, which leaves no trace at the target.
bool Rail::post_confirmation() {
    if (!runnable_.empty() || asked_ + 1 == sequence_ || confirmation_asks_ != 0) return false;
    fi_msg_rma message{};
    message.addr = peer_;
    message.context = &confirmation_;
    long result = fi_writemsg(endpoint_object_.get(), &message, FI_COMPLETION | FI_DELIVERY_COMPLETE);
    if (result == -FI_EAGAIN) {
        blocked_ = true;
        return false;
    }
    if (result != 0) {
        fail(libfabric_fault("fi_writemsg", result, Status::refused));
        return true;
    }
    confirmation_asks_ = sequence_;  // One past the last write: all are before it.
    asked_ = sequence_ - 1;
    return true;
}

Rail::Slot* Rail::slot_of(void* context) {
    auto* slot = static_cast<Slot*>(context);
    bool ours = slot >= slots_.data() && slot < slots_.data() + slots_.size();
    return ours && slot->part ? slot : nullptr;
}

PartPtr Rail::free_slot(Slot& slot) {
    --outstanding_;
    free_.push_back(&slot);
    return std::move(slot.part);
}

PartPtr Rail::culprit() const {
    if (culprit_ != nullptr) return culprit_;
    // A stream that broke cancels all its writes; they are executed in order, so the oldest is the one that broke it.
    uint64_t first = failed_sequence_;
    PartPtr part = failed_;
    for (const Slot& slot : slots_) {
        if (!slot.part || slot.sequence > first) continue;
        first = slot.sequence;
        part = slot.part;
    }
    return part;
}

void Rail::fail(Fault fault) { fault_ = std::move(fault); }

}  // namespace kvmesh::fabric

#pragma once

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <compare>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "fabric/doorbell.h"
#include "fabric/immediate_table.h"
#include "fabric/nic.h"
#include "fabric/transfer.h"

namespace kvmesh::fabric {

// Counters of one NIC, for metrics and tests.
struct Stats {
    uint64_t posted = 0;
    uint64_t completed = 0;
    uint64_t bytes = 0;    // of the posted writes
    uint64_t retries = 0;  // posts that the provider could not take yet (EAGAIN)
};

// One of a lane's rails.
struct RailId {
    uint64_t lane = 0;
    uint32_t rail = 0;  // its number in the lane, the same on both sides

    auto operator<=>(const RailId&) const = default;
};

// The endpoint on one NIC of one peer connection (its lane), like a queue pair: its own completion queue and address
// vector, so that closing it stops everything that peer does here over that NIC and leaves nothing behind. Engine
// thread only.
class Rail {
  public:
    Rail(const Nic& nic, RailId id, uint32_t window);
    ~Rail();
    Rail(const Rail&) = delete;
    Rail& operator=(const Rail&) = delete;

    RailId id() const { return id_; }
    const Nic& nic() const { return nic_; }
    // The endpoint's raw address, for the peer.
    const std::string& endpoint() const { return endpoint_; }
    std::string doorbell() const { return doorbell_ ? doorbell_->name() : ""; }
    void connect(const std::string& endpoint, const std::string& doorbell);

    // A descriptor that wakes a sleeper, and the queue to ask first whether sleeping is safe (none with a doorbell).
    int wait_fd() const;
    fid* wait_object() const { return doorbell_ ? nullptr : &queue_->fid; }
    void silence();

    // Queues a part that has writes to post.
    void enqueue(const PartPtr& part);

    // Reads completions and posts up to the window. Appends parts that ended. True when anything moved.
    bool progress(ImmediateTable& immediates, Stats& stats, std::vector<PartPtr>& ended);

    // Reads whatever is in the completion queue now.
    void settle(ImmediateTable& immediates, Stats& stats, std::vector<PartPtr>& ended);

    uint32_t outstanding() const { return outstanding_; }
    // The last post was refused for lack of room: try again soon, nobody wakes us.
    bool blocked() const { return blocked_; }
    // Set once something failed; nothing is posted from then on.
    const std::optional<Fault>& fault() const { return fault_; }
    // The part whose write brought the fault about; none where no write did. On a stream it is a well-founded
    // guess.
    PartPtr culprit() const;
    bool suspected = false;  // the peer was asked whether it lives

    // Lets the peer write to a region, and takes it back. A write that was under way may still touch the mapping, which
    // is kept as long as the rail.
    void admit(const Region& region);
    void revoke(const Region& region);

  private:
    struct Slot {
        fi_context2 context{};  // first: libfabric hands back its address
        PartPtr part;
        uint32_t layer = 0;
        uint64_t sequence = 0;
        bool confirms = false;  // its completion means delivered, for all writes before it too
    };

    void open_queue();
    void open_endpoint();
    void* local_descriptor(const Region& region) const;
    bool read(ImmediateTable& immediates, Stats& stats, std::vector<PartPtr>& ended);
    void take_error();
    void take_completion(const fi_cq_data_entry& entry, int64_t now, std::vector<PartPtr>& ended);
    bool post(Stats& stats, std::vector<PartPtr>& ended);
    long post_one(Slot& slot, const TransferPart& part, const PageWrite& write);
    bool post_confirmation();
    void complete(Slot& slot, int64_t now, std::vector<PartPtr>& ended);
    void confirm(uint64_t sequence, int64_t now, std::vector<PartPtr>& ended);
    Slot* slot_of(void* context);
    PartPtr free_slot(Slot& slot);
    void fail(Fault fault);

    const Nic& nic_;
    RailId id_;
    std::vector<std::shared_ptr<Mapping>> retained_;  // destroyed last, after the endpoint
    std::optional<Doorbell> doorbell_;
    std::string peer_doorbell_;
    FidPtr<fid_domain> own_domain_;  // none where there is one for all
    fid_domain* domain_;
    std::map<const Region*, FidPtr<fid_mr>> registrations_;  // in our own domain
    FidPtr<fid_cq> queue_;
    FidPtr<fid_av> addresses_;
    FidPtr<fid_ep> endpoint_object_;
    std::string endpoint_;
    fi_addr_t peer_ = FI_ADDR_UNSPEC;
    std::vector<Slot> slots_;
    std::vector<Slot*> free_;
    std::deque<PartPtr> runnable_;
    std::vector<uint32_t> arrived_;
    uint64_t sequence_ = 1;           // of the next write
    uint64_t asked_ = 0;              // up to which confirmation was asked for
    uint64_t confirmed_ = 0;          // up to which it came
    std::deque<Slot*> unconfirmed_;   // complete here, perhaps not there; in order
    fi_context2 confirmation_{};      // of a confirmation that is no write
    uint64_t confirmation_asks_ = 0;  // what it will confirm; 0: none under way
    uint32_t outstanding_ = 0;
    bool blocked_ = false;
    std::optional<Fault> fault_;
    PartPtr culprit_;  // where the provider named it
    PartPtr failed_;   // of the oldest write that failed
    uint64_t failed_sequence_ = UINT64_MAX;
};

}  // namespace kvmesh::fabric

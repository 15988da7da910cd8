#pragma once

#include <rdma/fabric.h>

#include <memory>
#include <string>
#include <vector>

namespace kvmesh::fabric {

struct InfoDeleter {
    void operator()(fi_info* info) const { fi_freeinfo(info); }
};
using InfoPtr = std::unique_ptr<fi_info, InfoDeleter>;

// A provider as kvmesh names it ("tcp", "shm", "libfabric:<name>") and what that means for libfabric.
struct Provider {
    std::string name;
    std::string libfabric_name;
    // The provider's completion queues have no file descriptor that wakes a sleeper at no cost: peers ring a doorbell.
    bool doorbell = false;
    // When a write of that length counts as complete: at the default level TCP reports writes that the target refuses
    // later.
    uint64_t completion_flags(uint64_t length) const;

    // Throws SetupError for a name that is none of the above.
    static Provider named(const std::string& name);

    // One write in so many asks for its delivery to be confirmed. On a TCP stream writes are executed in order, so that
    // one confirmation is good for all before it, and saves the target a message a page.
    uint32_t confirm_every() const;

    // The endpoints to open on a NIC: a numeric address of it, or the name of its device ("eth0", "mlx5_0",
    // "rdmap79s0"). A provider without addresses (shm, efa) takes any address as its first device. Throws SetupError
    // (unavailable) where there is none.
    InfoPtr find(const std::string& nic) const;
};

// The version of libfabric that runs, as "major.minor"; the program is compiled against 1.17 and runs on 1.17 and
// later.
std::string library_version();

// The API version to ask for: what runs, capped at the newest this code was tested with.
uint32_t api_version();

// The kvmesh names of the RDM providers present that can write with an immediate.
std::vector<std::string> present_providers();

}  // namespace kvmesh::fabric

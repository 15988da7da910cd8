#include "fabric/nic.h"

#include <rdma/fi_errno.h>
#include <sys/random.h>
#include <sys/resource.h>

#include "fabric/fault.h"

namespace kvmesh::fabric {

uint64_t random_u64() {
    uint64_t value = 0;
    if (getrandom(&value, sizeof value, 0) != static_cast<ssize_t>(sizeof value))
        throw SetupError(system_fault("getrandom", "no random numbers"));
    return value;
}

Nic::Nic(Provider provider, const std::string& name, size_t index)
    : provider_(std::move(provider)), index_(index), info_(provider_.find(name)) {
    fid_fabric* fabric = nullptr;
    check("fi_fabric", fi_fabric(info_->fabric_attr, &fabric, nullptr), Status::unavailable);
    fabric_.reset(fabric);
    if (info_->domain_attr->cq_data_size < sizeof(uint32_t))
        throw SetupError(
            {Status::unavailable, "fi_getinfo", 0, provider_.libfabric_name + " carries no 32-bit immediates"});
    FidPtr<fid_domain> domain = open_domain();  // Also to know now whether it can be opened.
    if (!own_keys()) shared_domain_ = std::move(domain);
}

FidPtr<fid_domain> Nic::open_domain() const {
    fid_domain* domain = nullptr;
    check("fi_domain", fi_domain(fabric_.get(), info_.get(), &domain, nullptr), Status::unavailable);
    return FidPtr<fid_domain>(domain);
}

uint64_t Nic::draw_key() const {
    size_t bytes = info_->domain_attr->mr_key_size;
    return random_u64() & (bytes >= sizeof(uint64_t) ? ~0ULL : (1ULL << (8 * bytes)) - 1);
}

FidPtr<fid_mr> Nic::register_memory(fid_domain* domain, void* base, size_t length, uint64_t key) const {
    fid_mr* region = nullptr;
    int result = fi_mr_reg(domain, base, length, FI_WRITE | FI_REMOTE_WRITE, 0, key, 0, &region, nullptr);
    if (result == -FI_ENOMEM) {
        rlimit locked{};
        getrlimit(RLIMIT_MEMLOCK, &locked);
        throw SetupError({Status::failed, "fi_mr_reg", FI_ENOMEM,
                          "cannot pin " + std::to_string(length) +
                              " bytes: the limit of locked memory (ulimit -l) is " + std::to_string(locked.rlim_cur) +
                              " bytes"});
    }
    check("fi_mr_reg", result);
    return FidPtr<fid_mr>(region);
}

}  // namespace kvmesh::fabric

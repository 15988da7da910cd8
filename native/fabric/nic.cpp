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

Nic::Nic(Provider provider, const std::string& host) : provider_(std::move(provider)), info_(provider_.find(host)) {
    fid_fabric* fabric = nullptr;
    check("fi_fabric", fi_fabric(info_->fabric_attr, &fabric, nullptr), Status::unavailable);
    fabric_.reset(fabric);
    fid_domain* domain = nullptr;
    check("fi_domain", fi_domain(fabric, info_.get(), &domain, nullptr), Status::unavailable);
    domain_.reset(domain);
    if (info_->domain_attr->cq_data_size < sizeof(uint32_t))
        throw SetupError(
            {Status::unavailable, "fi_getinfo", 0, provider_.libfabric_name + " carries no 32-bit immediates"});
}

FidPtr<fid_mr> Nic::register_memory(void* base, size_t length) const {
    constexpr int kTries = 8;
    size_t key_bytes = info_->domain_attr->mr_key_size;
    uint64_t key_mask = key_bytes >= 8 ? ~0ULL : (1ULL << (8 * key_bytes)) - 1;
    fid_mr* region = nullptr;
    int result = 0;
    for (int i = 0; i < kTries; ++i) {
        uint64_t key = has(FI_MR_PROV_KEY) ? 0 : random_u64() & key_mask;
        result = fi_mr_reg(domain_.get(), base, length, FI_WRITE | FI_REMOTE_WRITE, 0, key, 0, &region, nullptr);
        if (result != -FI_ENOKEY) break;  // Taken: draw another.
    }
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

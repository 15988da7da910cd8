#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>

#include <memory>
#include <string>

#include "fabric/provider.h"

namespace kvmesh::fabric {

// Closes a libfabric object.
template <typename T>
struct FidDeleter {
    void operator()(T* object) const { fi_close(&object->fid); }
};
template <typename T>
using FidPtr = std::unique_ptr<T, FidDeleter<T>>;

// One open domain. Only the engine's thread calls it after construction.
class Nic {
  public:
    Nic(Provider provider, const std::string& host);

    const Provider& provider() const { return provider_; }
    fi_info* info() const { return info_.get(); }
    fid_fabric* fabric() const { return fabric_.get(); }
    fid_domain* domain() const { return domain_.get(); }
    bool has(int mr_mode) const { return (info_->domain_attr->mr_mode & mr_mode) != 0; }

    // Registers for local reads and remote writes, under a random key where the provider lets us choose.
    FidPtr<fid_mr> register_memory(void* base, size_t length) const;

  private:
    Provider provider_;
    InfoPtr info_;
    FidPtr<fid_fabric> fabric_;
    FidPtr<fid_domain> domain_;
};

// 64 random bits from the kernel.
uint64_t random_u64();

}  // namespace kvmesh::fabric

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

// A device of a fabric. Only its engine's thread calls it after construction.
//
// Where the provider lets us choose keys, every peer gets a domain of its own (`own_keys`), and a region is registered
// in all of them under one key: closing a domain ends everything in it. On 1.17's net provider closing only the
// endpoint leaves connections behind that were not complete, and a later event on one of them crashes whoever polls the
// domain. Where the hardware makes the keys there is one domain for all peers.
class Nic {
  public:
    // `name`: as `Provider::find` takes it. `index`: its place among the fabric's NICs.
    Nic(Provider provider, const std::string& name, size_t index);

    size_t index() const { return index_; }
    const Provider& provider() const { return provider_; }
    fi_info* info() const { return info_.get(); }
    fid_fabric* fabric() const { return fabric_.get(); }
    bool has(int mr_mode) const { return (info_->domain_attr->mr_mode & mr_mode) != 0; }
    bool own_keys() const { return !has(FI_MR_PROV_KEY); }

    // The one for all peers; none with `own_keys`.
    fid_domain* shared_domain() const { return shared_domain_.get(); }
    FidPtr<fid_domain> open_domain() const;

    // A random key of the provider's width.
    uint64_t draw_key() const;
    // Registers for local reads and remote writes. The key matters with `own_keys` only.
    FidPtr<fid_mr> register_memory(fid_domain* domain, void* base, size_t length, uint64_t key) const;

  private:
    Provider provider_;
    size_t index_;
    InfoPtr info_;
    FidPtr<fid_fabric> fabric_;
    FidPtr<fid_domain> shared_domain_;
};

// 64 random bits from the kernel.
uint64_t random_u64();

}  // namespace kvmesh::fabric

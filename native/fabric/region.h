#pragma once

#include <memory>

#include "fabric/descriptor.h"
#include "fabric/nic.h"

namespace kvmesh::fabric {

// A shared mapping of a file descriptor. Outlives its registration while a write may still touch it.
class Mapping {
  public:
    Mapping(int fd, size_t length);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::byte* base() const { return base_; }
    size_t length() const { return length_; }

  private:
    std::byte* base_ = nullptr;
    size_t length_ = 0;
};

// Registered memory of this process. Shares ownership with its Python object by `shared_from_this`: a deleter that
// needs the GIL would run in whichever native thread lets go last, and that thread may hold a lock for which the GIL's
// holder waits.
//
// Closing revokes the key; the mapping stays until the last user lets go.
class Region : public std::enable_shared_from_this<Region> {
  public:
    // Engine thread only.
    Region(const Nic& nic, std::shared_ptr<Mapping> mapping);

    size_t length() const { return mapping_->length(); }
    std::byte* base() const { return mapping_->base(); }
    const std::shared_ptr<Mapping>& mapping() const { return mapping_; }
    const RemoteRegion& remote() const { return remote_; }

    // Engine thread only.
    void* local_descriptor() const { return registration_ ? fi_mr_desc(registration_.get()) : nullptr; }
    uint64_t key() const { return remote_.nics.front().key; }
    bool open() const { return open_; }
    void close() {
        open_ = false;
        registration_.reset();
    }

  private:
    std::shared_ptr<Mapping> mapping_;
    FidPtr<fid_mr> registration_;  // in the shared domain; with own keys each lane has its own
    RemoteRegion remote_;
    bool open_ = true;
};

}  // namespace kvmesh::fabric

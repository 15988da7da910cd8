#pragma once

#include <atomic>
#include <memory>
#include <vector>

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

// Memory of this process that is registered with every NIC of its fabric. Shares ownership with its Python object by
// `shared_from_this`: a deleter that needs the GIL would run in whichever native thread lets go last, and that thread
// may hold a lock for which the GIL's holder waits.
//
// Closing revokes the keys; the mapping stays until the last user lets go.
//
// A grant is a region too: a range of another's memory, under keys of its own.
class Region : public std::enable_shared_from_this<Region> {
  public:
    // `length` bytes from `offset` of the mapping, in a fabric with `nics` NICs; each attaches it before `remote` is
    // complete. Throws SetupError where the range ends past the mapping.
    Region(std::shared_ptr<Mapping> mapping, size_t offset, size_t length, size_t nics);

    size_t length() const { return remote_.length; }
    std::byte* base() const { return base_; }
    const std::shared_ptr<Mapping>& mapping() const { return mapping_; }
    const RemoteRegion& remote() const { return remote_; }
    // Any thread. After `close` no write is posted from here; the keys last until each NIC has detached it.
    bool open() const { return open_; }
    void close() { open_ = false; }

    // Only the thread of that NIC's engine calls these.
    void attach(const Nic& nic);
    void detach(const Nic& nic) { registrations_[nic.index()].reset(); }
    uint64_t key(size_t nic) const { return remote_.nics[nic].key; }
    void* local_descriptor(size_t nic) const {
        return registrations_[nic] ? fi_mr_desc(registrations_[nic].get()) : nullptr;
    }

  private:
    std::shared_ptr<Mapping> mapping_;
    std::byte* base_;
    std::vector<FidPtr<fid_mr>> registrations_;  // in each NIC's shared domain; with own keys each rail has its own
    RemoteRegion remote_;
    std::atomic<bool> open_{true};
};

}  // namespace kvmesh::fabric

#include "fabric/region.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "fabric/fault.h"

namespace kvmesh::fabric {

Mapping::Mapping(int fd, size_t length) : length_(length) {
    struct stat status{};
    if (fstat(fd, &status) != 0) throw SetupError(system_fault("fstat", "the region's file descriptor"));
    // A shorter file would turn the first write past its end into SIGBUS.
    if (length == 0 || status.st_size < 0 || static_cast<size_t>(status.st_size) < length)
        throw SetupError(
            {Status::failed, "mmap", EINVAL,
             "cannot map " + std::to_string(length) + " bytes of a file of " + std::to_string(status.st_size)});
    void* base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) throw SetupError(system_fault("mmap", "the region"));
    madvise(base, length, MADV_DONTFORK);  // A forked child must not share memory that a NIC writes.
    base_ = static_cast<std::byte*>(base);
}

Mapping::~Mapping() { munmap(base_, length_); }

Region::Region(std::shared_ptr<Mapping> mapping, size_t offset, size_t length, size_t nics)
    : mapping_(std::move(mapping)), base_(mapping_->base() + offset), registrations_(nics) {
    if (length == 0 || offset > mapping_->length() || length > mapping_->length() - offset)
        throw SetupError({Status::failed, "grant", ERANGE, "the range is empty or ends past its region"});
    remote_.base = reinterpret_cast<uint64_t>(base_);
    remote_.length = length;
    remote_.nics.resize(nics);
}

void Region::attach(const Nic& nic) {
    uint64_t key = nic.own_keys() ? nic.draw_key() : 0;
    FidPtr<fid_mr>& registration = registrations_[nic.index()];
    if (!nic.own_keys()) {
        registration = nic.register_memory(nic.shared_domain(), base_, length(), 0);
        key = fi_mr_key(registration.get());
    }
    remote_.nics[nic.index()] = {nic.has(FI_MR_VIRT_ADDR) ? remote_.base : 0, key};
}

}  // namespace kvmesh::fabric

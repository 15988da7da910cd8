#include "fabric/descriptor.h"

#include <cerrno>

#include "fabric/bytes.h"
#include "fabric/fault.h"

namespace kvmesh::fabric {

namespace {

constexpr char kMagic[] = "KVR";
constexpr uint8_t kVersion = 1;

[[noreturn]] void malformed(const std::string& why) {
    throw SetupError({Status::refused, "descriptor", EINVAL, "the region descriptor is malformed: " + why});
}

}  // namespace

std::string RemoteRegion::encode() const {
    ByteWriter out;
    out.raw(kMagic).u8(kVersion).u32(static_cast<uint32_t>(nics.size())).u64(base).u64(length);
    for (const NicKey& nic : nics) out.u64(nic.address).u64(nic.key);
    return out.take();
}

RemoteRegion RemoteRegion::decode(const std::string& bytes) {
    ByteReader in(bytes);
    if (in.raw(3) != kMagic) malformed("it does not start as one");
    if (uint8_t version = in.u8(); version != kVersion)
        malformed("version " + std::to_string(version) + ", not " + std::to_string(kVersion));
    RemoteRegion region;
    uint32_t count = in.u32();
    region.base = in.u64();
    region.length = in.u64();
    if (count == 0 || count > kMaxNics) malformed(std::to_string(count) + " NICs");
    for (uint32_t i = 0; i < count && in.good(); ++i) {
        uint64_t address = in.u64();
        region.nics.push_back({address, in.u64()});
    }
    if (!in.finished()) malformed(std::to_string(bytes.size()) + " bytes for " + std::to_string(count) + " NICs");
    for (const NicKey& nic : region.nics)
        if (nic.address + region.length < nic.address) malformed("it wraps around the address space");
    return region;
}

}  // namespace kvmesh::fabric

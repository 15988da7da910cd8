#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvmesh::fabric {

// Of one fabric.
constexpr size_t kMaxNics = 64;

// What a NIC of the target calls the start of a region, and the key that opens it.
struct NicKey {
    uint64_t address = 0;
    uint64_t key = 0;
};

// Memory of another process, as its descriptor describes it. Never dereferenced here.
struct RemoteRegion {
    uint64_t base = 0;
    uint64_t length = 0;
    std::vector<NicKey> nics;

    // Little-endian: "KVR", version, NIC count (32 bits), base, length, then (address, key) per NIC.
    std::string encode() const;

    // Throws SetupError (refused) when `bytes` is not exactly one descriptor of this version.
    static RemoteRegion decode(const std::string& bytes);
};

}  // namespace kvmesh::fabric

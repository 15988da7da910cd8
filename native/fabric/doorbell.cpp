#include "fabric/doorbell.h"

#include <sys/un.h>

#include <cstddef>
#include <cstring>

#include "fabric/fault.h"
#include "fabric/nic.h"

namespace kvmesh::fabric {

namespace {

socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
    address = {};
    address.sun_family = AF_UNIX;
    size_t length = std::min(name.size(), sizeof address.sun_path - 1);
    std::memcpy(address.sun_path + 1, name.data(), length);  // The leading zero makes it abstract.
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

}  // namespace

Doorbell::Doorbell()
    : socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
      name_("kvmesh-" + std::to_string(random_u64())) {
    sockaddr_un address;
    socklen_t length = abstract_address(name_, address);
    if (!socket_ || bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0)
        throw SetupError(system_fault("bind", "the doorbell"));
}

void Doorbell::silence() {
    char byte;
    while (recv(socket_.get(), &byte, sizeof byte, MSG_DONTWAIT) >= 0) {
    }
}

void Doorbell::ring(const std::string& name) {
    sockaddr_un address;
    socklen_t length = abstract_address(name, address);
    char byte = 0;
    sendto(socket_.get(), &byte, sizeof byte, MSG_DONTWAIT, reinterpret_cast<sockaddr*>(&address), length);
}

}  // namespace kvmesh::fabric

#include "fabric/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstring>

#include "fabric/fault.h"

namespace kvmesh::fabric {

void FileDescriptor::reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

FileDescriptor make_eventfd() {
    FileDescriptor fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!fd) throw SetupError(system_fault("eventfd", "cannot make an event descriptor"));
    return fd;
}

void raise_eventfd(int fd) { eventfd_write(fd, 1); }

void lower_eventfd(int fd) {
    eventfd_t value = 0;
    eventfd_read(fd, &value);
}

FileDescriptor make_epoll() {
    FileDescriptor fd(epoll_create1(EPOLL_CLOEXEC));
    if (!fd) throw SetupError(system_fault("epoll_create1", "cannot make an epoll descriptor"));
    return fd;
}

namespace {

void epoll_do(int epoll, int operation, int fd, uint32_t events, uint64_t data) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = data;
    if (epoll_ctl(epoll, operation, fd, &event) != 0) throw SetupError(system_fault("epoll_ctl", "cannot watch"));
}

FileDescriptor make_stream(int family) {
    FileDescriptor fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd) {
        int one = 1;
        setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    return fd;
}

}  // namespace

void epoll_add(int epoll, int fd, uint32_t events, uint64_t data) { epoll_do(epoll, EPOLL_CTL_ADD, fd, events, data); }

void epoll_change(int epoll, int fd, uint32_t events, uint64_t data) {
    epoll_do(epoll, EPOLL_CTL_MOD, fd, events, data);
}

SocketAddress SocketAddress::parse(const std::string& host, uint16_t port) {
    addrinfo hints{};
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    int result = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (result != 0)
        throw SetupError(
            {Status::failed, "getaddrinfo", EINVAL, host + " is no numeric address: " + gai_strerror(result)});
    SocketAddress address;
    std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
    address.length = found->ai_addrlen;
    freeaddrinfo(found);
    return address;
}

uint16_t SocketAddress::port() const {
    if (storage.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
    return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

std::string SocketAddress::text() const {
    char host[NI_MAXHOST] = "";
    getnameinfo(get(), length, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
    return std::string(host) + " port " + std::to_string(port());
}

FileDescriptor listen_on(const SocketAddress& address) {
    FileDescriptor fd = make_stream(address.storage.ss_family);
    if (!fd) throw SetupError(system_fault("socket", "the fabric's listener", Status::unavailable));
    if (bind(fd.get(), address.get(), address.length) != 0)
        throw SetupError(system_fault("bind", "the fabric's listener on " + address.text(), Status::unavailable));
    if (listen(fd.get(), SOMAXCONN) != 0)
        throw SetupError(system_fault("listen", "the fabric's listener on " + address.text(), Status::unavailable));
    return fd;
}

SocketAddress local_address(int fd) {
    SocketAddress address;
    address.length = sizeof address.storage;
    getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.length);
    return address;
}

FileDescriptor start_connect(const SocketAddress& address) {
    FileDescriptor fd = make_stream(address.storage.ss_family);
    if (fd && connect(fd.get(), address.get(), address.length) != 0 && errno != EINPROGRESS) {
        int error = errno;
        fd.reset();
        errno = error;
    }
    return fd;
}

int connect_error(int fd) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    return error;
}

FileDescriptor accept_from(int listener) {
    FileDescriptor fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) {
        int one = 1;
        setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    return fd;
}

FileDescriptor occupy(const SocketAddress& address) {
    FileDescriptor fd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    int one = 1;
    // The port may be in TIME_WAIT from the connections that were just closed.
    if (fd) setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (fd && bind(fd.get(), address.get(), address.length) != 0) fd.reset();
    return fd;
}

}  // namespace kvmesh::fabric

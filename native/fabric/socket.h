#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <utility>

namespace kvmesh::fabric {

// Owns a file descriptor.
class FileDescriptor {
  public:
    FileDescriptor() = default;
    explicit FileDescriptor(int fd) : fd_(fd) {}
    FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~FileDescriptor() { reset(); }

    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }
    void reset();

  private:
    int fd_ = -1;
};

FileDescriptor make_eventfd();
void raise_eventfd(int fd);
void lower_eventfd(int fd);
FileDescriptor make_epoll();
// Level-triggered.
void epoll_add(int epoll, int fd, uint32_t events, uint64_t data);
void epoll_change(int epoll, int fd, uint32_t events, uint64_t data);

// A numeric host and a port.
struct SocketAddress {
    sockaddr_storage storage{};
    socklen_t length = 0;

    // Throws SetupError where `host` is not a numeric address.
    static SocketAddress parse(const std::string& host, uint16_t port);
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
    uint16_t port() const;
    std::string text() const;
};

// Non-blocking, close-on-exec, TCP_NODELAY on every stream. Set-up errors throw.
FileDescriptor listen_on(const SocketAddress& address);
SocketAddress local_address(int fd);
// Starts a connection; an invalid descriptor (errno set) where it failed at once.
FileDescriptor start_connect(const SocketAddress& address);
// The pending error of a socket whose connect ended, 0 for success.
int connect_error(int fd);
FileDescriptor accept_from(int listener);

// Binds without listening, so that the kernel gives the port to nobody else. Invalid where that failed.
FileDescriptor occupy(const SocketAddress& address);

}  // namespace kvmesh::fabric

#include "fabric/session.h"

#include <cerrno>
#include <cstring>

namespace kvmesh::fabric {

namespace {

// Control messages are small and rare: a peer that leaves this much unread has stopped.
constexpr size_t kMaxUnsent = 1 << 20;
// Read from one connection before it is the others' turn.
constexpr size_t kReadTurn = 64 * 1024;

}  // namespace

void Session::send(const std::string& bytes) {
    unsent_ += bytes;
    if (state != State::connecting) flush();
}

void Session::flush() {
    while (!unsent_.empty() && !lost_) {
        ssize_t sent = ::send(fd(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            unsent_.erase(0, static_cast<size_t>(sent));
        } else if (errno == EAGAIN) {
            if (unsent_.size() > kMaxUnsent) {
                lost_ = true;
                error_ = "the peer does not read its control connection";
            }
            return;
        } else if (errno != EINTR) {
            // `receive` reports it, after what the peer said before.
            return unsent_.clear();
        }
    }
}

bool Session::receive() {
    char bytes[4096];
    for (size_t taken = 0; !lost_;) {
        if (taken >= kReadTurn) return true;
        ssize_t got = recv(fd(), bytes, sizeof bytes, MSG_DONTWAIT);
        if (got > 0) {
            reader_.append(bytes, static_cast<size_t>(got));
            taken += static_cast<size_t>(got);
        } else if (got == 0) {
            error_ = "the peer's control connection ended";
            lost_ = true;
        } else if (errno == EAGAIN) {
            return true;
        } else if (errno != EINTR) {
            error_ = std::string("the peer's control connection broke: ") + std::strerror(errno);
            lost_ = true;
        }
    }
    return false;
}

}  // namespace kvmesh::fabric

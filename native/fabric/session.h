#pragma once

#include <optional>
#include <string>

#include "fabric/message.h"
#include "fabric/socket.h"

namespace kvmesh::fabric {

// One control connection: its socket, its frames, and where its life stands. What the frames mean is `Control`'s part.
class Session {
  public:
    enum class State : uint8_t {
        connecting,  // ours; the socket is not connected yet
        greeting,    // ours; hello is sent
        waiting,     // theirs; hello has not come
        open,
        leaving,  // our endpoint is closed; the peer has not said that its is
    };

    Session(FileDescriptor socket, State state, int64_t now)
        : state(state), last_seen(now), socket_(std::move(socket)) {}

    int fd() const { return socket_.get(); }
    // Sends what it can now and keeps the rest.
    void send(const std::string& bytes);
    void flush();
    bool wants_write() const { return state == State::connecting || !unsent_.empty(); }
    // Reads what is there, up to a bound: whoever sends without end must not keep this thread from the others. False:
    // the other side is gone; `error` says how.
    bool receive();
    std::optional<Frame> next() { return reader_.next(); }
    bool broken() const { return reader_.broken(); }
    const std::string& error() const { return error_; }

    State state;
    int64_t last_seen;
    int64_t deadline = 0;  // of any state but open
    uint64_t identity = 0;
    uint64_t lane = 0;  // 0: none
    uint64_t floor = 0;
    bool announce = false;  // leaving: tell Python that the peer is lost
    std::string reason;

  private:
    FileDescriptor socket_;
    FrameReader reader_;
    std::string unsent_;
    std::string error_;
    bool lost_ = false;
};

}  // namespace kvmesh::fabric

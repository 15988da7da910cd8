#pragma once

#include <atomic>
#include <map>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fabric/engines.h"
#include "fabric/session.h"

namespace kvmesh::fabric {

struct ControlOptions {
    std::string provider;
    std::string host;          // where peers reach this process
    std::string numeric_host;  // what it resolves to here
    uint64_t identity = 0;
};

// Who is connected and who lives: one thread that owns the listener and all control connections, pairs endpoints, and
// decides that a peer is lost (end of file, or silence for about a second). It may wait for the engine; the engine
// never waits for it.
class Control {
  public:
    Control(ControlOptions options, Engines& engines, EventQueue& events);
    ~Control() { stop(); }

    // The address to give to peers now.
    PeerAddress address() const;
    // Says goodbye to all peers and ends the thread. Idempotent.
    void stop();

    // Pushes `connected` with `token`, at the latest after `timeout_ns`. `host` is the numeric form of the address's.
    void connect(uint64_t token, PeerAddress address, std::string host, int64_t timeout_ns);
    // Pushes `fenced` with `token` when no endpoint of that identity is left here.
    void fence(uint64_t token, uint64_t identity);

  private:
    struct Waiter {
        uint64_t token;
        int64_t deadline;
    };
    // A connection under construction; concurrent calls for one identity share it.
    struct Attempt {
        PeerAddress address;
        SocketAddress where;
        std::vector<Waiter> waiters;
        int session = -1;
        int64_t retry_at = 0;
        std::string last_error = "no answer";
    };

    void run();
    int wait_ms(int64_t now) const;
    void handle(int fd, uint32_t events);
    void accept_all();
    void make_room();
    void service(int fd);
    bool dispatch(Session& session, const Frame& frame);
    void take_hello(Session& session, const std::string& payload);
    std::string objection(const Hello& hello) const;
    void take_welcome(Session& session, const std::string& payload);
    void take_rejection(Session& session, const std::string& reason);
    void take_goodbye(Session& session, const std::string& reason);
    void abandon_lane(Session& session, const std::string& reason);
    void opened(Session& session);

    void try_connect(Attempt& attempt, int64_t now);
    void greet(Session& session);
    void attempt_failed(Session& session, const std::string& error);
    void give_up(uint64_t identity, const Fault& fault);
    Attempt* attempt_of(const Session& session);

    void tick(int64_t now);
    void tick_session(Session& session, int64_t now);
    void expire_attempts(int64_t now);
    void lose(Session& session, const std::string& why);
    void lose_identity(uint64_t identity, const Fault& fault);
    void leave(Session& session, const std::string& reason, bool announce);
    void left(Session& session);
    void discard(int fd);
    Session* add(FileDescriptor socket, Session::State state, int64_t deadline);
    void watch_writes(Session& session);
    Session* session_of_lane(uint64_t lane);
    Session* open_session(uint64_t identity);
    void say_goodbye();
    uint64_t floor_of(uint64_t identity) const;

    ControlOptions options_;
    Engines& engines_;
    EventQueue& events_;
    TaskQueue tasks_;
    FileDescriptor epoll_;
    FileDescriptor listener_;
    uint16_t port_ = 0;
    std::atomic<uint64_t> generation_{0};
    std::map<int, std::unique_ptr<Session>> sessions_;
    std::map<uint64_t, Attempt> attempts_;             // by identity
    std::unordered_map<uint64_t, uint64_t> floors_;    // by fenced identity: the first generation that is let in
    std::vector<std::unique_ptr<Session>> discarded_;  // closed in this round; events for them may still come
    int64_t last_tick_ = 0;
    int64_t next_ping_ = 0;
    std::mutex stop_mutex_;
    bool stopped_ = false;
    bool stopping_ = false;  // control thread
    std::thread thread_;
};

}  // namespace kvmesh::fabric

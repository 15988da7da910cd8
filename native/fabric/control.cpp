#include "fabric/control.h"

#include <pthread.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvmesh::fabric {

using State = Session::State;

namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kPing = 200 * kMs;
constexpr int64_t kSilence = 1000 * kMs;
// This thread itself did not run for so long (a stopped process, a starved machine): silence proves nothing.
constexpr int64_t kStarved = 500 * kMs;
constexpr int64_t kHandshake = 2000 * kMs;
constexpr int64_t kLeave = 1000 * kMs;
constexpr size_t kMaxWaiting = 256;  // connections that have not said hello
constexpr long kMaxLanes = 8;        // of one peer; two that connect to each other at once have two

}  // namespace

Control::Control(ControlOptions options, Engines& engines, EventQueue& events)
    : options_(std::move(options)),
      engines_(engines),
      events_(events),
      epoll_(make_epoll()),
      listener_(listen_on(SocketAddress::parse(options_.numeric_host, 0))),
      port_(local_address(listener_.get()).port()) {
    epoll_add(epoll_.get(), tasks_.fd(), EPOLLIN, static_cast<uint64_t>(tasks_.fd()));
    epoll_add(epoll_.get(), listener_.get(), EPOLLIN, static_cast<uint64_t>(listener_.get()));
    engines_.set_hooks({
        [this](uint64_t lane) {
            tasks_.push([this, lane] {
                if (Session* session = session_of_lane(lane)) session->send(frame(MessageType::probe));
            });
        },
        [this](uint64_t lane, Fault fault) {
            tasks_.push([this, lane, fault] {
                if (Session* session = session_of_lane(lane)) leave(*session, fault.text, true);
            });
        },
    });
    thread_ = std::thread([this] { run(); });
}

PeerAddress Control::address() const {
    return {options_.provider, options_.host, port_, options_.identity, generation_.load(), engines_.nics()};
}

void Control::stop() {
    {
        std::lock_guard lock(stop_mutex_);
        if (stopped_) return;
        stopped_ = true;
    }
    tasks_.push([this] { stopping_ = true; });
    thread_.join();
}

void Control::run() {
    pthread_setname_np(pthread_self(), "kvmesh-control");
    while (!stopping_) {
        epoll_event events[32];
        int count = 0;
        if (tasks_.may_sleep()) count = epoll_wait(epoll_.get(), events, 32, wait_ms(now_ns()));
        tasks_.awake();
        for (int i = 0; i < count; ++i) handle(static_cast<int>(events[i].data.u64), events[i].events);
        tasks_.run();
        tick(now_ns());
        discarded_.clear();
    }
    say_goodbye();
}

int Control::wait_ms(int64_t now) const {
    if (sessions_.empty() && attempts_.empty()) return -1;
    bool all_open = std::all_of(sessions_.begin(), sessions_.end(),
                                [](const auto& entry) { return entry.second->state == State::open; });
    if (!all_open || !attempts_.empty()) return 20;
    return static_cast<int>(std::max<int64_t>(0, (next_ping_ - now) / kMs + 1));
}

void Control::handle(int fd, uint32_t events) {
    if (fd == tasks_.fd()) return;
    if (fd == listener_.get()) return accept_all();
    auto found = sessions_.find(fd);
    if (found == sessions_.end()) return;
    Session& session = *found->second;
    if (session.state == State::connecting) {
        if (int error = connect_error(fd)) return attempt_failed(session, std::strerror(error));
        if (events & EPOLLOUT) return greet(session);
        return;
    }
    if (events & EPOLLOUT) {
        session.flush();
        watch_writes(session);
    }
    service(fd);
}

void Control::accept_all() {
    while (FileDescriptor socket = accept_from(listener_.get())) {
        make_room();
        add(std::move(socket), State::waiting, now_ns() + kHandshake);
    }
}

// Of too many that have not said hello the oldest goes: a peer says hello at once.
void Control::make_room() {
    std::vector<Session*> waiting;
    for (auto& [fd, session] : sessions_)
        if (session->state == State::waiting) waiting.push_back(session.get());
    if (waiting.size() < kMaxWaiting) return;
    Session* oldest = *std::min_element(waiting.begin(), waiting.end(),
                                        [](Session* a, Session* b) { return a->deadline < b->deadline; });
    discard(oldest->fd());
}

Session* Control::add(FileDescriptor socket, State state, int64_t deadline) {
    int fd = socket.get();
    auto session = std::make_unique<Session>(std::move(socket), state, now_ns());
    session->deadline = deadline;
    epoll_add(epoll_.get(), fd, state == State::connecting ? EPOLLIN | EPOLLOUT : EPOLLIN, static_cast<uint64_t>(fd));
    return (sessions_[fd] = std::move(session)).get();
}

void Control::watch_writes(Session& session) {
    uint32_t events = session.wants_write() ? EPOLLIN | EPOLLOUT : EPOLLIN;
    epoll_change(epoll_.get(), session.fd(), events, static_cast<uint64_t>(session.fd()));
}

void Control::discard(int fd) {
    auto found = sessions_.find(fd);
    if (found == sessions_.end()) return;
    shutdown(fd, SHUT_RDWR);  // The peer hears it now; the descriptor's number is free at the end of the round.
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
    discarded_.push_back(std::move(found->second));
    sessions_.erase(found);
}

void Control::service(int fd) {
    auto found = sessions_.find(fd);
    if (found == sessions_.end()) return;
    Session& session = *found->second;
    bool alive = session.receive();
    session.last_seen = now_ns();
    while (std::optional<Frame> frame = session.next())
        if (!dispatch(session, *frame)) return;
    if (session.broken()) return lose(session, "the peer does not speak this protocol");
    if (!alive) lose(session, session.error());
}

// False when the session is gone.
bool Control::dispatch(Session& session, const Frame& frame) {
    int fd = session.fd();
    if (session.state == State::waiting && frame.type != MessageType::hello) {
        discard(fd);
        return false;
    }
    switch (frame.type) {
        case MessageType::hello:
            take_hello(session, frame.payload);
            break;
        case MessageType::welcome:
            take_welcome(session, frame.payload);
            break;
        case MessageType::reject:
            take_rejection(session, frame.payload);
            break;
        case MessageType::goodbye:
            take_goodbye(session, frame.payload);
            break;
        case MessageType::probe:
            tasks_.run();  // The engine may have said that it closes this lane: then the answer is a goodbye.
            if (session.state == State::open) session.send(kvmesh::fabric::frame(MessageType::alive));
            break;
        case MessageType::alive:
            engines_.confirm_alive(session.lane);
            break;
        case MessageType::gone:
            if (session.state == State::leaving) left(session);
            break;
        case MessageType::ping:
            break;
    }
    auto found = sessions_.find(fd);
    return found != sessions_.end() && found->second.get() == &session;
}

std::string Control::objection(const Hello& hello) const {
    if (hello.protocol != kProtocolVersion)
        return "fabric protocol " + std::to_string(hello.protocol) + ", this side speaks " +
               std::to_string(kProtocolVersion);
    if (hello.provider != options_.provider)
        return "provider " + hello.provider + ", this side has " + options_.provider;
    if (hello.target != options_.identity) return "the address is of another incarnation";
    if (hello.identity == options_.identity) return "the same identity on both sides";
    if (hello.generation < floor_of(hello.identity)) return "the address is from before this peer was fenced";
    if (hello.rails.size() != std::max<size_t>(hello.nics, engines_.nics()))
        return std::to_string(hello.rails.size()) + " rails, for " + std::to_string(hello.nics) + " NICs there and " +
               std::to_string(engines_.nics()) + " here";
    auto lanes = std::count_if(sessions_.begin(), sessions_.end(),
                               [&](const auto& entry) { return entry.second->identity == hello.identity; });
    if (lanes >= kMaxLanes) return "this peer has " + std::to_string(lanes) + " connections already";
    return "";
}

void Control::take_hello(Session& session, const std::string& payload) {
    if (session.state != State::waiting) return;
    std::optional<Hello> hello = Hello::decode(payload);
    if (!hello) return discard(session.fd());
    // What the peer said on its earlier connections comes first: a goodbye there must not end this one.
    std::vector<int> earlier;
    for (auto& [fd, other] : sessions_)
        if (other->identity == hello->identity && other->state != State::connecting) earlier.push_back(fd);
    for (int fd : earlier) service(fd);

    std::string reason = objection(*hello);
    if (reason.empty()) try {
            LaneOffer offer = engines_.open_lane(hello->nics);
            session.lane = offer.lane;
            engines_.connect_lane(offer.lane, hello->rails);
            session.identity = hello->identity;
            session.floor = hello->floor;
            session.send(frame(MessageType::welcome,
                               Welcome{options_.identity, floor_of(hello->identity), offer.rails}.encode()));
            return opened(session);
        } catch (const SetupError& error) {
            reason = error.what();
        }
    session.send(frame(MessageType::reject, reason));
    abandon_lane(session, reason);
    discard(session.fd());
}

void Control::take_welcome(Session& session, const std::string& payload) {
    if (session.state != State::greeting) return;
    std::optional<Welcome> welcome = Welcome::decode(payload);
    if (!welcome || welcome->identity != session.identity) return attempt_failed(session, "a malformed welcome");
    try {
        engines_.connect_lane(session.lane, welcome->rails);
    } catch (const SetupError& error) {
        return attempt_failed(session, error.what());
    }
    session.floor = welcome->floor;
    opened(session);
}

void Control::opened(Session& session) {
    session.state = State::open;
    session.deadline = 0;
    auto found = attempts_.find(session.identity);
    if (found == attempts_.end()) return;
    Attempt& attempt = found->second;
    for (const Waiter& waiter : std::exchange(attempt.waiters, {})) {
        Event event;
        event.kind = EventKind::connected;
        event.token = waiter.token;
        event.lane = session.lane;
        event.peer = session.identity;
        events_.push(std::move(event));
    }
    // Two processes may connect to each other at once: then our own attempt is still under way, and stays a second
    // lane.
    if (attempt.session == session.fd() || attempt.session < 0) attempts_.erase(found);
}

void Control::take_rejection(Session& session, const std::string& reason) {
    if (session.state != State::greeting) return;
    uint64_t identity = session.identity;
    abandon_lane(session, reason);
    discard(session.fd());
    give_up(identity, {Status::unreachable, "hello", 0, "the peer refused the connection: " + reason});
}

// Of a connection that never came up: nothing was written over it.
void Control::abandon_lane(Session& session, const std::string& reason) {
    if (session.lane == 0) return;
    engines_.close_lane(session.lane, {Status::peer_lost, "hello", 0, reason});
    engines_.finish_lane(session.lane);
}

void Control::take_goodbye(Session& session, const std::string& reason) {
    if (session.state == State::leaving) {
        session.send(frame(MessageType::gone));
        return left(session);
    }
    if (session.state == State::greeting) return attempt_failed(session, reason);
    if (session.state != State::open) return;
    Fault fault{Status::peer_lost, "goodbye", 0, "the peer closed the connection: " + reason};
    engines_.close_lane(session.lane, fault);
    session.send(frame(MessageType::gone));
    lose_identity(session.identity, fault);
}

uint64_t Control::floor_of(uint64_t identity) const {
    auto found = floors_.find(identity);
    return found == floors_.end() ? 0 : found->second;
}

Session* Control::session_of_lane(uint64_t lane) {
    for (auto& [fd, session] : sessions_)
        if (session->lane == lane) return session.get();
    return nullptr;
}

Session* Control::open_session(uint64_t identity) {
    for (auto& [fd, session] : sessions_)
        if (session->identity == identity && session->state == State::open) return session.get();
    return nullptr;
}

void Control::tick(int64_t now) {
    bool starved = last_tick_ != 0 && now - last_tick_ > kStarved;
    last_tick_ = now;
    bool ping = now >= next_ping_;
    if (ping) next_ping_ = now + kPing;
    std::vector<Session*> all;
    for (auto& [fd, session] : sessions_) all.push_back(session.get());
    for (Session* session : all) {
        if (starved) session->last_seen = now;
        if (ping && session->state == State::open) session->send(frame(MessageType::ping));
        // One that was lost with another of the same peer is discarded, not destroyed, until the round ends.
        if (sessions_.contains(session->fd())) tick_session(*session, now);
    }
    expire_attempts(now);
}

void Control::tick_session(Session& session, int64_t now) {
    if (session.state == State::open) {
        if (now - session.last_seen > kSilence)
            lose(session, "the peer has been silent for over a second");
        else if (session.wants_write())
            watch_writes(session);
    } else if (now > session.deadline) {
        lose(session, "no answer in time");
    }
}

void Control::lose(Session& session, const std::string& why) {
    switch (session.state) {
        case State::connecting:
        case State::greeting:
            return attempt_failed(session, why);
        case State::waiting:
            return discard(session.fd());
        case State::leaving:
            return left(session);
        case State::open:
            return lose_identity(session.identity, {Status::peer_lost, "control", 0, why});
    }
}

void Control::lose_identity(uint64_t identity, const Fault& fault) {
    std::vector<Session*> lost;
    for (auto& [fd, session] : sessions_)
        if (session->identity == identity && session->state == State::open) lost.push_back(session.get());
    for (Session* session : lost) {
        engines_.close_lane(session->lane, fault);
        engines_.finish_lane(session->lane);
        discard(session->fd());
    }
    if (lost.empty()) return;
    Event event;
    event.kind = EventKind::peer_lost;
    event.peer = identity;
    event.fault = fault;
    events_.push(std::move(event));
}

// Our endpoints of that peer are closed first; then it is asked to close its own, so that what is on the way is gone
// too.
void Control::leave(Session& session, const std::string& reason, bool announce) {
    for (auto& [fd, other] : sessions_) {
        if (other->identity != session.identity || other->state != State::open) continue;
        engines_.close_lane(other->lane, {Status::peer_lost, "lane", 0, reason});
        other->state = State::leaving;
        other->deadline = now_ns() + kLeave;
        other->reason = reason;
        other->announce = std::exchange(announce, false);
        other->send(frame(MessageType::goodbye, reason));
    }
}

void Control::left(Session& session) {
    engines_.finish_lane(session.lane);
    if (session.announce) {
        Event event;
        event.kind = EventKind::peer_lost;
        event.peer = session.identity;
        event.fault = {Status::peer_lost, "lane", 0, session.reason};
        events_.push(std::move(event));
    }
    discard(session.fd());
}

}  // namespace kvmesh::fabric

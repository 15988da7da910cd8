// The half of `Control` that makes connections, fences them and ends them all.

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "fabric/control.h"

namespace kvmesh::fabric {

using State = Session::State;

namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kRetry = 50 * kMs;
constexpr int64_t kHandshake = 2000 * kMs;
constexpr int64_t kStop = 300 * kMs;

Event connect_failed(uint64_t token, uint64_t identity, Fault fault) {
    Event event;
    event.kind = EventKind::connected;
    event.token = token;
    event.peer = identity;
    event.fault = std::move(fault);
    return event;
}

}  // namespace

void Control::connect(uint64_t token, PeerAddress address, std::string host, int64_t timeout_ns) {
    SocketAddress where = SocketAddress::parse(host, address.port);
    int64_t deadline = now_ns() + timeout_ns;
    tasks_.push([this, token, address = std::move(address), where, deadline] {
        uint64_t identity = address.identity;
        if (Session* session = open_session(identity)) {
            Event event = connect_failed(token, identity, {Status::ok, "", 0, ""});
            event.lane = session->lane;
            if (address.generation < session->floor)
                event.fault = {Status::unreachable, "connect", 0,
                               "the address is from before the peer fenced this side"};
            return events_.push(std::move(event));
        }
        auto [found, fresh] = attempts_.try_emplace(identity);
        found->second.waiters.push_back({token, deadline});
        if (!fresh && found->second.session >= 0) return;
        found->second.address = address;
        found->second.where = where;
        try_connect(found->second, now_ns());
    });
}

void Control::try_connect(Attempt& attempt, int64_t now) {
    FileDescriptor socket = start_connect(attempt.where);
    if (!socket) {
        attempt.last_error = std::string("connect: ") + std::strerror(errno);
        attempt.retry_at = now + kRetry;
        return;
    }
    Session* session = add(std::move(socket), State::connecting, now + kHandshake);
    session->identity = attempt.address.identity;
    attempt.session = session->fd();
}

Control::Attempt* Control::attempt_of(const Session& session) {
    auto found = attempts_.find(session.identity);
    return found != attempts_.end() && found->second.session == session.fd() ? &found->second : nullptr;
}

void Control::greet(Session& session) {
    Attempt* attempt = attempt_of(session);
    if (attempt == nullptr) return discard(session.fd());
    try {
        LaneOffer offer = engines_.open_lane(attempt->address.nics);
        Hello hello;
        hello.provider = options_.provider;
        hello.identity = options_.identity;
        hello.target = session.identity;
        hello.generation = attempt->address.generation;
        hello.floor = floor_of(session.identity);
        hello.nics = static_cast<uint16_t>(engines_.nics());
        hello.rails = std::move(offer.rails);
        session.lane = offer.lane;
        session.state = State::greeting;
        session.deadline = now_ns() + kHandshake;
        session.send(frame(MessageType::hello, hello.encode()));
        watch_writes(session);
    } catch (const SetupError& error) {
        Fault fault = error.fault();
        uint64_t identity = session.identity;
        discard(session.fd());
        give_up(identity, fault);
    }
}

void Control::attempt_failed(Session& session, const std::string& error) {
    abandon_lane(session, error);
    if (Attempt* attempt = attempt_of(session)) {
        attempt->session = -1;
        attempt->last_error = error;
        attempt->retry_at = now_ns() + kRetry;
    }
    discard(session.fd());
}

void Control::give_up(uint64_t identity, const Fault& fault) {
    auto found = attempts_.find(identity);
    if (found == attempts_.end()) return;
    for (const Waiter& waiter : found->second.waiters) events_.push(connect_failed(waiter.token, identity, fault));
    attempts_.erase(found);
}

void Control::expire_attempts(int64_t now) {
    std::vector<uint64_t> idle;
    for (auto& [identity, attempt] : attempts_) {
        std::erase_if(attempt.waiters, [&](const Waiter& waiter) {
            if (now < waiter.deadline) return false;
            std::string text = "no connection to " + attempt.where.text() + " in time: " + attempt.last_error;
            events_.push(connect_failed(waiter.token, identity, {Status::unreachable, "connect", ETIMEDOUT, text}));
            return true;
        });
        if (attempt.session >= 0) continue;
        if (attempt.waiters.empty()) {
            idle.push_back(identity);
        } else if (now >= attempt.retry_at) {
            try_connect(attempt, now);
        }
    }
    for (uint64_t identity : idle) attempts_.erase(identity);
}

void Control::fence(uint64_t token, uint64_t identity) {
    tasks_.push([this, token, identity] {
        floors_[identity] = ++generation_;
        if (Session* session = open_session(identity)) leave(*session, "the peer was fenced", false);
        // An attempt of ours may have told the peer an endpoint already.
        std::vector<Session*> ours;
        for (auto& [fd, session] : sessions_)
            if (session->identity == identity && session->state != State::leaving) ours.push_back(session.get());
        for (Session* session : ours) attempt_failed(*session, "the peer was fenced");
        give_up(identity, {Status::peer_lost, "fence", 0, "the peer was fenced"});
        Event event;
        event.kind = EventKind::fenced;
        event.token = token;
        event.peer = identity;
        if (engines_.stuck())
            event.fault = {Status::unavailable, "fence", 0, "the provider does not return from a call"};
        events_.push(std::move(event));
    });
}

void Control::say_goodbye() {
    listener_.reset();
    while (!attempts_.empty())
        give_up(attempts_.begin()->first, {Status::unreachable, "close", 0, "the fabric was closed"});
    std::vector<Session*> all;
    for (auto& [fd, session] : sessions_) all.push_back(session.get());
    for (Session* session : all) {
        if (session->state == State::open)
            leave(*session, "the peer closed its fabric", false);
        else if (session->state != State::leaving)
            lose(*session, "the fabric was closed");
    }
    int64_t deadline = now_ns() + kStop;
    while (!sessions_.empty() && now_ns() < deadline) {
        epoll_event events[32];
        int count = epoll_wait(epoll_.get(), events, 32, 20);
        for (int i = 0; i < count; ++i) {
            int fd = static_cast<int>(events[i].data.u64);
            if (sessions_.contains(fd)) handle(fd, events[i].events);
        }
    }
    while (!sessions_.empty()) left(*sessions_.begin()->second);
    discarded_.clear();
}

}  // namespace kvmesh::fabric

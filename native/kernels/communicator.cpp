#include "communicator.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "layer_counter.h"
#include "pause.h"

namespace kvmesh {

namespace {

constexpr int kSpins = 2000;        // some tens of microseconds, about what ranks differ by after equal work
constexpr double kLookEvery = 0.1;  // seconds of sleep between looks at whether the other process lives
constexpr int64_t kLine = 64;

bool has_ended(int64_t process) {
    int fd = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
    if (fd < 0) return errno == ESRCH;
    pollfd ended{fd, POLLIN, 0};
    bool gone = poll(&ended, 1, 0) == 1;
    close(fd);
    return gone;
}

}  // namespace

Communicator::Communicator(char* memory, int64_t bytes, int rank, int ranks)
    : arrivals_(reinterpret_cast<Arrival*>(memory)), rank_(rank), ranks_(ranks) {
    if (ranks < 1 || rank < 0 || rank >= ranks) throw std::invalid_argument("rank: takes 0 .. ranks - 1");
    int64_t header = ranks * static_cast<int64_t>(sizeof(Arrival));
    slot_bytes_ = (bytes - header) / (2 * ranks) / kLine * kLine;
    if (slot_bytes_ < kLine) throw std::invalid_argument("memory is too small for so many ranks");
    slots_ = memory + header;
    // Where ranks share processors, spinning takes them from the one that is waited for.
    spins_ = static_cast<int>(std::thread::hardware_concurrency()) >= ranks ? kSpins : 0;
    entered_ = read_counter(&arrivals_[rank].count);
    std::atomic_ref<int64_t>(arrivals_[rank].process).store(getpid(), std::memory_order_release);
}

// Two sets of slots in turn: a rank that writes into one has passed the barrier after the other's last use, so every
// rank has read what was in it before.
char* Communicator::slot(int rank) const {
    return slots_ + (static_cast<int64_t>(entered_ % 2) * ranks_ + rank) * slot_bytes_;
}

std::optional<int> Communicator::all_reduce_sum(float* values, int64_t count, double timeout_s) {
    const int64_t most = slot_bytes_ / static_cast<int64_t>(sizeof(float));
    for (int64_t first = 0; first < count; first += most) {
        int64_t size = std::min(most, count - first);
        float* to = values + first;
        const char* base = slot(0);
        std::memcpy(slot(rank_), to, size * sizeof(float));
        if (auto missing = barrier(timeout_s)) return missing;
        std::memcpy(to, base, size * sizeof(float));
        for (int rank = 1; rank < ranks_; ++rank) {
            const float* from = reinterpret_cast<const float*>(base + rank * slot_bytes_);
            for (int64_t i = 0; i < size; ++i) to[i] += from[i];
        }
    }
    return std::nullopt;
}

std::optional<int> Communicator::gather(const float* values, int64_t count, float* out, double timeout_s) {
    const int64_t most = slot_bytes_ / static_cast<int64_t>(sizeof(float));
    for (int64_t first = 0; first < count; first += most) {
        int64_t size = std::min(most, count - first);
        const char* base = slot(0);
        std::memcpy(slot(rank_), values + first, size * sizeof(float));
        if (auto missing = barrier(timeout_s)) return missing;
        if (rank_ != 0) continue;
        for (int rank = 0; rank < ranks_; ++rank)
            std::memcpy(out + rank * count + first, base + rank * slot_bytes_, size * sizeof(float));
    }
    return std::nullopt;
}

std::optional<int> Communicator::barrier(double timeout_s) {
    ++entered_;
    advance(&arrivals_[rank_].count);
    for (int rank = 0; rank < ranks_; ++rank)
        if (rank != rank_ && !wait(arrivals_[rank], timeout_s)) return rank;
    return std::nullopt;
}

bool Communicator::wait(const Arrival& arrival, double timeout_s) const {
    using Clock = std::chrono::steady_clock;
    for (int i = 0; i < spins_; ++i) {
        if (read_counter(&arrival.count) >= entered_) return true;
        pause_briefly();
    }
    auto begin = Clock::now();
    for (;;) {
        double left = timeout_s - std::chrono::duration<double>(Clock::now() - begin).count();
        if (wait_above(&arrival.count, entered_ - 1, std::clamp(left, 0.0, kLookEvery)) >= entered_) return true;
        if (left <= 0) return false;
        int64_t process =
            std::atomic_ref<int64_t>(const_cast<int64_t&>(arrival.process)).load(std::memory_order_acquire);
        if (process && has_ended(process)) return read_counter(&arrival.count) >= entered_;
    }
}

}  // namespace kvmesh

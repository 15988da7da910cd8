// Layer plans, with the counter advanced by another thread.

#include <linux/futex.h>
#include <sys/syscall.h>

#include <thread>

#include "rig.h"

using namespace kvmesh::fabric;

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint32_t kPages = 16, kLayers = 12;

struct Counter {
    Counter() : fd(memfd_create("kvmesh-counter", MFD_CLOEXEC)) {
        CHECK(ftruncate(fd, 4096) == 0);
        word = static_cast<uint64_t*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    }
    ~Counter() {
        munmap(word, 4096);
        close(fd);
    }
    void advance() {
        __atomic_fetch_add(word, 1, __ATOMIC_RELEASE);
        syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
    }
    int fd;
    uint64_t* word;
};

void chunks() {
    Node a(1), b(2);
    Memory source(a.fabric, kLayers * kPages * kPage), target(b.fabric, kLayers * kPages * kPage);
    uint64_t lane = a.connect_to(b);
    Counter counter;
    std::shared_ptr<LayerWatcher> watcher = a.fabric.watch(counter.fd, 0);
    constexpr uint64_t kChunks = 20;
    uint64_t arrival = b.fabric.expect(1, kChunks * kLayers * kPages);
    std::vector<uint64_t> transfers;
    std::thread executor([&] {
        for (uint64_t i = 0; i < kChunks * kLayers; ++i) counter.advance();
    });
    for (uint64_t chunk = 0; chunk < kChunks; ++chunk) {
        std::vector<std::tuple<uint64_t, WritePlan, double>> writes;
        writes.emplace_back(lane, plan(source, target, kPages, kPage, 1, kLayers), 10.0);
        for (uint64_t token : a.fabric.arm(*watcher, chunk * kLayers, std::move(writes))) transfers.push_back(token);
    }
    for (uint64_t token : transfers) CHECK(a.wait(token).fault.status == Status::ok);
    b.wait(arrival);
    executor.join();
}

void disarm_and_close() {
    Node a(1), b(2);
    Memory source(a.fabric, kLayers * kPages * kPage), target(b.fabric, kLayers * kPages * kPage);
    uint64_t lane = a.connect_to(b);
    Counter counter;
    for (int round = 0; round < 20; ++round) {
        std::shared_ptr<LayerWatcher> watcher = a.fabric.watch(counter.fd, round % 2 == 0 ? 0 : 100'000);
        std::vector<std::tuple<uint64_t, WritePlan, double>> writes;
        writes.emplace_back(lane, plan(source, target, kPages, kPage, 1, kLayers), 10.0);
        uint64_t first = __atomic_load_n(counter.word, __ATOMIC_ACQUIRE);
        std::vector<uint64_t> tokens = a.fabric.arm(*watcher, first, std::move(writes));
        std::thread executor([&] { counter.advance(); });
        if (round % 3 == 0) watcher->disarm();
        watcher->close();
        executor.join();
        CHECK(a.wait(tokens[0]).fault.status == Status::cancelled);
    }
}

}  // namespace

int main() {
    chunks();
    disarm_and_close();
}

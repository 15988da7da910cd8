#pragma once

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <map>
#include <numeric>

#include "check.h"
#include "fabric/fabric.h"

namespace kvmesh::fabric {

// A memfd, its own mapping, and its registration.
struct Memory {
    Memory(Fabric& fabric, size_t length) : length(length) {
        int fd = memfd_create("kvmesh-test", MFD_CLOEXEC);
        CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(length)) == 0);
        bytes = static_cast<uint8_t*>(mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
        CHECK(bytes != MAP_FAILED);
        region = fabric.register_region(fd, length);
        close(fd);
    }
    ~Memory() { munmap(bytes, length); }

    size_t length;
    uint8_t* bytes;
    std::shared_ptr<Region> region;
};

// A fabric and the events it has told, by token.
struct Node {
    // `groups`: the NICs of each.
    explicit Node(uint64_t identity, const std::string& provider = "tcp",
                  const std::vector<std::vector<std::string>>& groups = {{"127.0.0.1"}})
        : fabric(options(identity, provider, groups)) {}

    static FabricOptions options(uint64_t identity, const std::string& provider,
                                 const std::vector<std::vector<std::string>>& groups) {
        FabricOptions options{provider, "127.0.0.1", "127.0.0.1", identity, {}, {false, 64}};
        for (const auto& nics : groups) options.groups.push_back({nics, {}});
        return options;
    }

    // Until `done` holds, 20 s at most.
    void until(const std::function<bool()>& done) {
        int64_t deadline = now_ns() + 20'000'000'000;
        while (true) {
            for (Event& event : fabric.drain()) {
                if (event.kind == EventKind::peer_lost)
                    lost.push_back(event.peer);
                else
                    ended[event.token] = std::move(event);
            }
            if (done()) return;
            CHECK(now_ns() < deadline);
            pollfd readable{fabric.event_fd(), POLLIN, 0};
            poll(&readable, 1, 100);
        }
    }
    Event wait(uint64_t token) {
        until([&] { return ended.contains(token); });
        return ended[token];
    }
    uint64_t connect_to(Node& other) {
        Event event = wait(fabric.connect(other.fabric.address(), "127.0.0.1", 5.0));
        CHECK(event.fault.status == Status::ok);
        return event.lane;
    }

    Fabric fabric;
    std::map<uint64_t, Event> ended;
    std::vector<uint64_t> lost;
};

inline WritePlan plan(const Memory& source, const Memory& target, uint32_t pages, uint64_t page_bytes,
                      uint32_t immediate, uint32_t layers = 1) {
    WritePlan plan;
    plan.source = source.region;
    plan.target = target.region->remote();
    plan.source_pages.resize(pages);
    std::iota(plan.source_pages.begin(), plan.source_pages.end(), 0);
    plan.target_pages = plan.source_pages;
    plan.run_bytes = plan.source_page_stride = plan.target_page_stride = page_bytes;
    plan.source_layer_stride = plan.target_layer_stride = pages * page_bytes;
    plan.num_layers = layers;
    plan.immediate = immediate;
    return plan;
}

}  // namespace kvmesh::fabric

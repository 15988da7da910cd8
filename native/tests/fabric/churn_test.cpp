// Peers come, write and go, some in the middle, while others go on: the lifetimes of lanes, sessions and transfers.

#include <thread>

#include "rig.h"

using namespace kvmesh::fabric;

namespace {

constexpr uint64_t kPage = 65536;
constexpr uint32_t kPages = 16;

void visitor(Fabric& home, const Memory& target, uint64_t identity) {
    for (uint64_t round = 0; round < 6; ++round) {
        Node node(identity * 100 + round);
        Memory source(node.fabric, kPages * kPage);
        Event event = node.wait(node.fabric.connect(home.address(), "127.0.0.1", 10.0));
        CHECK(event.fault.status == Status::ok);
        WritePlan many = plan(source, target, kPages, kPage, static_cast<uint32_t>(identity));
        many.num_layers = 20;
        many.source_layer_stride = many.target_layer_stride = 0;
        uint64_t first = node.fabric.write(event.lane, many, 10.0);
        uint64_t second = node.fabric.write(event.lane, many, 10.0);
        if (round % 3 == 0) CHECK(node.wait(second).fault.status == Status::ok);
        if (round % 3 == 1) node.fabric.cancel(second);
        if (round % 3 == 2) node.fabric.close();
        node.wait(first);
        node.wait(second);
    }
}

void fences(Node& home) {
    for (int i = 0; i < 30; ++i) {
        home.wait(home.fabric.fence(1 + static_cast<uint64_t>(i)));
        home.fabric.stats();
    }
}

}  // namespace

int main() {
    Node home(7);
    Memory target(home.fabric, kPages * kPage);
    std::vector<std::thread> visitors;
    for (uint64_t i = 1; i <= 3; ++i) visitors.emplace_back([&, i] { visitor(home.fabric, target, i); });
    fences(home);
    for (std::thread& thread : visitors) thread.join();
    home.until([&] { return home.lost.size() == 18; });
}

// Two fabrics: data, counts, refusal, cancel, deadline, fence and loss.

#include "rig.h"

using namespace kvmesh::fabric;

namespace {

constexpr uint64_t kPage = 16384;
constexpr uint32_t kPages = 64;

void data(const std::string& provider) {
    Node a(1, provider), b(2, provider);
    Memory source(a.fabric, 4 * kPages * kPage), target(b.fabric, 4 * kPages * kPage);
    for (size_t i = 0; i < source.length; ++i) source.bytes[i] = static_cast<uint8_t>(i * 31 + i / 4096);
    uint64_t lane = a.connect_to(b);
    CHECK(a.connect_to(b) == lane);
    uint64_t arrival = b.fabric.expect(9, 4 * kPages);
    Event event = a.wait(a.fabric.write(lane, plan(source, target, kPages, kPage, 9, 4), 10.0));
    CHECK(event.fault.status == Status::ok && event.writes == 4 * kPages && event.layers.size() == 4);
    b.wait(arrival);
    CHECK(std::memcmp(source.bytes, target.bytes, source.length) == 0);
    b.fabric.forget(9, arrival);
    CHECK(a.wait(a.fabric.write(lane, plan(source, target, 0, kPage, 9), 10.0)).writes == 0);
    WritePlan empty = plan(source, target, 1, 0, 9);
    arrival = b.fabric.expect(9, 1);
    CHECK(a.wait(a.fabric.write(lane, empty, 10.0)).writes == 1);
    b.wait(arrival);
}

void refusal() {
    Node a(1), b(2);
    Memory source(a.fabric, kPage), target(b.fabric, kPage);
    uint64_t lane = a.connect_to(b);
    WritePlan forged = plan(source, target, 1, kPage, 9);
    forged.target.nics[0].key ^= 1;
    CHECK(a.wait(a.fabric.write(lane, forged, 10.0)).fault.status == Status::refused);
    a.until([&] { return a.lost.size() == 1; });
    CHECK(a.wait(a.fabric.write(lane, plan(source, target, 1, kPage, 9), 10.0)).fault.status == Status::peer_lost);
    lane = a.connect_to(b);
    CHECK(a.wait(a.fabric.write(lane, plan(source, target, 1, kPage, 9), 10.0)).fault.status == Status::ok);
}

void cancel_and_deadline() {
    Node a(1), b(2);
    Memory source(a.fabric, kPages * kPage), target(b.fabric, kPages * kPage);
    uint64_t lane = a.connect_to(b);
    WritePlan many = plan(source, target, kPages, kPage, 9);
    many.num_layers = 1000;
    many.source_layer_stride = many.target_layer_stride = 0;
    uint64_t transfer = a.fabric.write(lane, many, 10.0);
    a.fabric.cancel(transfer);
    a.fabric.cancel(transfer);
    CHECK(a.wait(transfer).fault.status == Status::cancelled);
    CHECK(a.wait(a.fabric.write(lane, many, 0.02)).fault.status == Status::timed_out);
    FabricStats stats = a.fabric.stats();
    CHECK(stats.all.posted == stats.all.completed);
    CHECK(a.wait(a.fabric.write(lane, plan(source, target, 1, kPage, 9), 10.0)).fault.status == Status::ok);
}

void fence_and_loss() {
    Node a(1), b(2);
    Memory source(a.fabric, kPages * kPage), target(b.fabric, kPages * kPage);
    uint64_t lane = a.connect_to(b);
    WritePlan many = plan(source, target, kPages, kPage, 9);
    many.num_layers = 1000;
    many.source_layer_stride = many.target_layer_stride = 0;
    uint64_t begun = b.fabric.expect(9, 1);
    uint64_t transfer = a.fabric.write(lane, many, 10.0);
    b.wait(begun);
    std::string before = b.fabric.address();
    b.wait(b.fabric.fence(1));
    std::memset(target.bytes, 0xee, target.length);
    CHECK(a.wait(transfer).fault.status == Status::peer_lost);
    a.until([&] { return a.lost.size() == 1; });
    for (size_t i = 0; i < target.length; ++i) CHECK(target.bytes[i] == 0xee);
    CHECK(a.wait(a.fabric.connect(before, "127.0.0.1", 5.0)).fault.status == Status::unreachable);
    lane = a.connect_to(b);
    transfer = a.fabric.write(lane, many, 10.0);
    b.fabric.close();
    CHECK(a.wait(transfer).fault.status == Status::peer_lost);
    a.until([&] { return a.lost.size() == 2; });
}

}  // namespace

int main() {
    data("tcp");
    data("shm");
    refusal();
    cancel_and_deadline();
    fence_and_loss();
}

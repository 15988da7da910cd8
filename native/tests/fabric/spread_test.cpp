// Several NICs: what is spread arrives once, keeps every NIC busy, and is one transfer to whoever cancels, fences or
// loses it.

#include "rig.h"

using namespace kvmesh::fabric;

namespace {

constexpr uint64_t kPage = 16384;
constexpr uint32_t kPages = 48;

// One progress thread for two NICs; one for each; one for two and another for the third.
const std::vector<std::vector<std::string>> kOneGroup{{"127.0.0.1", "127.0.0.2"}};
const std::vector<std::vector<std::string>> kTwoGroups{{"127.0.0.1"}, {"127.0.0.2"}};
const std::vector<std::vector<std::string>> kThree{{"127.0.0.1", "127.0.0.2"}, {"127.0.0.3"}};
const std::vector<std::vector<std::string>> kSingle{{"127.0.0.1"}};

WritePlan long_plan(const Memory& source, const Memory& target) {
    WritePlan many = plan(source, target, kPages, kPage, 9);
    many.num_layers = 1000;
    many.source_layer_stride = many.target_layer_stride = 0;
    return many;
}

void numbering() {
    Node a(1, "tcp", kOneGroup);
    Memory memory(a.fabric, 6 * kPage);
    auto transfer = std::make_shared<Transfer>(1, 1, plan(memory, memory, 2, kPage, 9, 3), now_ns());
    std::vector<PartPtr> parts = Transfer::spread(transfer, 2, 4);
    CHECK(parts.size() == 4 && parts[0]->rail() == 2 && parts[3]->rail() == 1);
    CHECK(!parts[0]->next());
    for (const PartPtr& part : parts) part->release(2);  // writes 0 to 3 of 6
    for (const PartPtr& part : parts) {
        CHECK(part->next() && part->at_last());
        part->posted();
        CHECK(!part->next());
        part->release(3);
    }
    CHECK(parts[0]->next()->layer == 2 && parts[1]->next()->layer == 2 && !parts[2]->next() && !parts[3]->next());
    CHECK(parts[1]->next()->source == memory.region->base() + 5 * kPage);
    for (const PartPtr& part : parts) {
        part->completed(part == parts[0] || part == parts[1] ? 0 : 1, 5);
        part->stop({Status::cancelled, "cancel", 0, ""});
        CHECK(part->finished());
        std::optional<Event> event = part->end();
        CHECK(event.has_value() == (part == parts[3]));  // Once, with all of them.
        if (event) CHECK(event->writes == 4 && event->fault.status == Status::cancelled && event->layers.size() == 3);
    }
    // No more parts than writes, and one for nothing.
    transfer = std::make_shared<Transfer>(2, 1, plan(memory, memory, 1, kPage, 9, 3), now_ns());
    CHECK(Transfer::spread(transfer, 0, 4).size() == 3);
    transfer = std::make_shared<Transfer>(3, 1, plan(memory, memory, 0, kPage, 9, 3), now_ns());
    parts = Transfer::spread(transfer, 3, 4);
    CHECK(parts.size() == 1 && parts[0]->finished() && parts[0]->end());
}

void data(const std::vector<std::vector<std::string>>& from, const std::vector<std::vector<std::string>>& to) {
    Node a(1, "tcp", from), b(2, "tcp", to);
    Memory source(a.fabric, 4 * kPages * kPage), target(b.fabric, 4 * kPages * kPage);
    for (size_t i = 0; i < source.length; ++i) source.bytes[i] = static_cast<uint8_t>(i * 31 + i / 4096);
    uint64_t lane = a.connect_to(b);
    CHECK(b.connect_to(a) != 0);
    uint64_t arrival = b.fabric.expect(9, 4 * kPages);
    Event event = a.wait(a.fabric.write(lane, plan(source, target, kPages, kPage, 9, 4), 10.0));
    CHECK(event.fault.status == Status::ok && event.writes == 4 * kPages && event.layers.size() == 4);
    for (const LayerTiming& layer : event.layers) CHECK(layer.posted_ns > 0 && layer.completed_ns > layer.posted_ns);
    b.wait(arrival);
    CHECK(std::memcmp(source.bytes, target.bytes, source.length) == 0);
    // Single writes take turns.
    for (int i = 0; i < 60; ++i)
        CHECK(a.wait(a.fabric.write(lane, plan(source, target, 1, kPage, 8), 10.0)).writes == 1);
    std::vector<Stats> nics = a.fabric.stats().nics;
    for (const Stats& nic : nics) CHECK(nic.posted == nic.completed && nic.bytes == nic.posted * kPage);
    size_t rails = std::max(nics.size(), b.fabric.stats().nics.size());
    if (rails % nics.size() == 0)
        for (const Stats& nic : nics) CHECK(nic.posted == (4 * kPages + 60) / nics.size());
}

void cancel_and_deadline() {
    Node a(1, "tcp", kTwoGroups), b(2, "tcp", kOneGroup);
    Memory source(a.fabric, kPages * kPage), target(b.fabric, kPages * kPage);
    uint64_t lane = a.connect_to(b);
    uint64_t begun = b.fabric.expect(9, 1);
    uint64_t transfer = a.fabric.write(lane, long_plan(source, target), 10.0);
    b.wait(begun);
    a.fabric.cancel(transfer);
    a.fabric.cancel(transfer);
    Event event = a.wait(transfer);
    FabricStats stats = a.fabric.stats();
    CHECK(event.fault.status == Status::cancelled && event.writes == stats.all.posted);
    CHECK(stats.all.posted == stats.all.completed && stats.nics[0].posted > 0 && stats.nics[1].posted > 0);
    CHECK(a.wait(a.fabric.write(lane, long_plan(source, target), 0.02)).fault.status == Status::timed_out);
    CHECK(a.wait(a.fabric.write(lane, plan(source, target, kPages, kPage, 9), 10.0)).fault.status == Status::ok);
    CHECK(a.lost.empty() && b.lost.empty());
}

// One NIC's connection breaks (a bad key there only): the peer is lost on both, and comes back.
void one_nic_is_lost(const std::vector<std::vector<std::string>>& groups, size_t forged_nic) {
    Node a(1, "tcp", groups), b(2, "tcp", kTwoGroups);
    Memory source(a.fabric, kPages * kPage), target(b.fabric, kPages * kPage);
    uint64_t lane = a.connect_to(b);
    WritePlan forged = plan(source, target, kPages, kPage, 8);
    forged.target.nics[forged_nic].key ^= 1;
    uint64_t bad = a.fabric.write(lane, forged, 10.0);
    uint64_t good = a.fabric.write(lane, long_plan(source, target), 10.0);  // behind it, and on the other NIC beside it
    CHECK(a.wait(bad).fault.status == Status::refused);
    CHECK(a.wait(good).fault.status == Status::peer_lost);
    a.until([&] { return a.lost.size() == 1; });
    b.until([&] { return b.lost.size() == 1; });
    // Its rails are closed on every NIC before the peer hears of it.
    std::memset(target.bytes, 0xee, target.length);
    CHECK(a.wait(a.fabric.write(lane, plan(source, target, kPages, kPage, 9), 10.0)).fault.status == Status::peer_lost);
    for (size_t i = 0; i < target.length; ++i) CHECK(target.bytes[i] == 0xee);
    lane = a.connect_to(b);
    CHECK(a.wait(a.fabric.write(lane, plan(source, target, kPages, kPage, 9), 10.0)).fault.status == Status::ok);
}

void fence_and_loss() {
    Node a(1, "tcp", kThree), b(2, "tcp", kTwoGroups);
    Memory source(a.fabric, kPages * kPage), target(b.fabric, kPages * kPage);
    uint64_t lane = a.connect_to(b);
    uint64_t begun = b.fabric.expect(9, 1);
    uint64_t transfer = a.fabric.write(lane, long_plan(source, target), 10.0);
    b.wait(begun);
    b.wait(b.fabric.fence(1));
    std::memset(target.bytes, 0xee, target.length);
    CHECK(a.wait(transfer).fault.status == Status::peer_lost);
    a.until([&] { return a.lost.size() == 1; });
    for (size_t i = 0; i < target.length; ++i) CHECK(target.bytes[i] == 0xee);
    lane = a.connect_to(b);
    transfer = a.fabric.write(lane, long_plan(source, target), 10.0);
    b.fabric.close_region(target.region);
    b.fabric.close();
    Event event = a.wait(transfer);
    CHECK(event.fault.status == Status::peer_lost || event.fault.status == Status::refused);
    a.until([&] { return a.lost.size() == 2; });
}

void what_cannot_be_opened() {
    CHECK_THROWS(SetupError, Node(1, "tcp", {}));
    CHECK_THROWS(SetupError, Node(1, "tcp", {{"127.0.0.1", "192.0.2.254"}}));
    CHECK_THROWS(SetupError, Node(1, "tcp", {{"127.0.0.1"}, {"no-such-device"}}));
    CHECK_THROWS(SetupError, Node(1, "tcp", {std::vector<std::string>(kMaxNics + 1, "127.0.0.1")}));
    Node named(1, "tcp", {{"lo"}});  // by the name of its interface
    CHECK(named.fabric.stats().nics.size() == 1);
}

}  // namespace

int main() {
    numbering();
    data(kOneGroup, kOneGroup);
    data(kTwoGroups, kThree);
    data(kThree, kSingle);
    data(kSingle, kThree);
    cancel_and_deadline();
    one_nic_is_lost(kOneGroup, 1);
    one_nic_is_lost(kTwoGroups, 0);
    one_nic_is_lost(kTwoGroups, 1);
    fence_and_loss();
    what_cannot_be_opened();
}

// Descriptors, addresses, frames and plans: encode, decode, and refuse what is malformed.

#include "check.h"
#include "fabric/descriptor.h"
#include "fabric/fault.h"
#include "fabric/message.h"
#include "rig.h"

using namespace kvmesh::fabric;

namespace {

void descriptors() {
    RemoteRegion region{4096, 8192, {{4096, 77}, {0, ~0ULL}}};
    std::string bytes = region.encode();
    RemoteRegion again = RemoteRegion::decode(bytes);
    CHECK(again.base == 4096 && again.length == 8192 && again.nics.size() == 2 && again.nics[1].key == ~0ULL);
    // Every prefix, and every single bit of the header's fixed part, is refused or still a sound descriptor.
    for (size_t length = 0; length < bytes.size(); ++length)
        CHECK_THROWS(SetupError, RemoteRegion::decode(bytes.substr(0, length)));
    for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
        std::string flipped = bytes;
        flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
        try {
            RemoteRegion::decode(flipped);
        } catch (const SetupError& error) {
            CHECK(error.fault().status == Status::refused);
        }
    }
}

void addresses() {
    PeerAddress address{"tcp", "prefill-1.mesh", 4711, 99, 3, 8};
    PeerAddress again = PeerAddress::decode(address.encode());
    CHECK(again.provider == "tcp" && again.host == "prefill-1.mesh" && again.port == 4711 && again.identity == 99 &&
          again.generation == 3 && again.nics == 8);
    std::string bytes = address.encode();
    for (size_t length = 0; length < bytes.size(); ++length)
        CHECK_THROWS(SetupError, PeerAddress::decode(bytes.substr(0, length)));
}

void check_hello(const Hello& got, const Hello& sent) {
    CHECK(got.nics == sent.nics && got.rails.size() == sent.rails.size());
    for (size_t i = 0; i < got.rails.size(); ++i)
        CHECK(got.rails[i].endpoint == sent.rails[i].endpoint && got.rails[i].doorbell == sent.rails[i].doorbell);
}

void frames() {
    Hello hello;
    hello.provider = "tcp";
    hello.identity = 1;
    hello.nics = 2;
    hello.rails = {{std::string("\x02\0raw", 5), ""}, {"other", "bell"}};
    std::string stream = frame(MessageType::hello, hello.encode()) + frame(MessageType::ping);
    FrameReader reader;
    int frames = 0;
    for (char byte : stream) {  // Whatever the pieces, the frames are the same.
        reader.append(&byte, 1);
        while (std::optional<Frame> one = reader.next()) {
            if (++frames == 1)
                check_hello(*Hello::decode(one->payload), hello);
            else
                CHECK(one->type == MessageType::ping && one->payload.empty());
        }
    }
    CHECK(frames == 2 && !reader.broken());
    reader.append("\xff\xff\xff\xff", 4);
    CHECK(!reader.next() && reader.broken());
    CHECK(!Hello::decode("KVMF\x01") && !Hello::decode("") && !Welcome::decode("short"));
}

void plans() {
    Node node(1);
    Memory source(node.fabric, 1 << 16), target(node.fabric, 1 << 15);
    WritePlan good = plan(source, target, 8, 4096, 1);
    good.validate();
    WritePlan wide = good;
    wide.target_pages.back() = 8;
    CHECK_THROWS(SetupError, wide.validate());
    WritePlan wraps = good;
    wraps.source_layer_stride = ~0ULL;
    wraps.num_layers = ~0U;
    CHECK_THROWS(SetupError, wraps.validate());
    WritePlan half = good;  // the second half of a source page to the first of one of twice its size
    half.run_bytes = half.source_offset = 2048;
    half.target_page_stride = 8192;
    half.target_pages = {0, 1, 2, 3, 0, 1, 2, 3};
    half.validate();
    half.target_offset = 8192 - 2048;
    half.validate();
    ++half.target_offset;  // past the last page, which is the region's end too
    CHECK_THROWS(SetupError, half.validate());
    half.target_pages = {0, 1, 2, 0, 1, 2, 0, 1};  // past a page only
    CHECK_THROWS(SetupError, half.validate());
    half.target_offset = ~0ULL;
    CHECK_THROWS(SetupError, half.validate());
    half.target_offset = 0;
    ++half.source_offset;
    CHECK_THROWS(SetupError, half.validate());
    WritePlan uneven = good;
    uneven.target_pages.pop_back();
    CHECK_THROWS(SetupError, uneven.validate());
    WritePlan empty = wraps;
    empty.source_pages.clear();
    empty.target_pages.clear();
    empty.validate();
}

}  // namespace

int main() {
    descriptors();
    addresses();
    frames();
    plans();
}

#include "fabric/message.h"

#include <cerrno>

#include "fabric/bytes.h"
#include "fabric/descriptor.h"
#include "fabric/fault.h"

namespace kvmesh::fabric {

namespace {

constexpr char kAddressMagic[] = "KVA";
constexpr char kHelloMagic[] = "KVMF";
constexpr uint8_t kAddressVersion = 2;
constexpr uint32_t kMaxFrame = 64 * 1024;

void write_rails(ByteWriter& out, const std::vector<RailOffer>& rails) {
    out.u16(static_cast<uint16_t>(rails.size()));
    for (const RailOffer& rail : rails) out.text(rail.endpoint).text(rail.doorbell);
}

std::vector<RailOffer> read_rails(ByteReader& in) {
    std::vector<RailOffer> rails;
    uint16_t count = in.u16();
    for (uint16_t i = 0; i < count && in.good(); ++i) {
        RailOffer& rail = rails.emplace_back();
        rail.endpoint = in.text();
        rail.doorbell = in.text();
    }
    return rails;
}

}  // namespace

std::string PeerAddress::encode() const {
    ByteWriter out;
    out.raw(kAddressMagic).u8(kAddressVersion).u64(identity).u64(generation).u16(port);
    out.u16(static_cast<uint16_t>(nics)).text(host).text(provider);
    return out.take();
}

PeerAddress PeerAddress::decode(const std::string& bytes) {
    ByteReader in(bytes);
    PeerAddress address;
    bool ours = in.raw(3) == kAddressMagic && in.u8() == kAddressVersion;
    address.identity = in.u64();
    address.generation = in.u64();
    address.port = in.u16();
    address.nics = in.u16();
    address.host = in.text();
    address.provider = in.text();
    if (!ours || !in.finished() || address.nics == 0 || address.nics > kMaxNics)
        throw SetupError({Status::unreachable, "connect", EINVAL, "this is no fabric address of a known version"});
    return address;
}

std::string Hello::encode() const {
    ByteWriter out;
    out.raw(kHelloMagic).u16(protocol).text(provider).u64(identity).u64(target).u64(generation).u64(floor);
    out.u16(nics);
    write_rails(out, rails);
    return out.take();
}

std::optional<Hello> Hello::decode(const std::string& payload) {
    ByteReader in(payload);
    Hello hello;
    if (in.raw(4) != kHelloMagic) return std::nullopt;
    hello.protocol = in.u16();
    // The rest of another version's hello is not for us to read; its number is enough to refuse it.
    if (in.good() && hello.protocol != kProtocolVersion) return hello;
    hello.provider = in.text();
    hello.identity = in.u64();
    hello.target = in.u64();
    hello.generation = in.u64();
    hello.floor = in.u64();
    hello.nics = in.u16();
    hello.rails = read_rails(in);
    // 0 stands for a connection that has not said who it is.
    if (!in.finished() || hello.identity == 0 || hello.nics == 0 || hello.nics > kMaxNics) return std::nullopt;
    return hello;
}

std::string Welcome::encode() const {
    ByteWriter out;
    out.u64(identity).u64(floor);
    write_rails(out, rails);
    return out.take();
}

std::optional<Welcome> Welcome::decode(const std::string& payload) {
    ByteReader in(payload);
    Welcome welcome;
    welcome.identity = in.u64();
    welcome.floor = in.u64();
    welcome.rails = read_rails(in);
    if (!in.finished()) return std::nullopt;
    return welcome;
}

std::string frame(MessageType type, const std::string& payload) {
    ByteWriter out;
    out.u32(static_cast<uint32_t>(payload.size() + 1)).u8(static_cast<uint8_t>(type)).raw(payload);
    return out.take();
}

std::optional<Frame> FrameReader::next() {
    constexpr size_t kHeader = sizeof(uint32_t);
    if (broken_ || buffer_.size() < kHeader) return std::nullopt;
    uint32_t length = ByteReader(buffer_).u32();
    if (length == 0 || length > kMaxFrame) {
        broken_ = true;
        return std::nullopt;
    }
    if (buffer_.size() < kHeader + length) return std::nullopt;
    Frame frame{static_cast<MessageType>(buffer_[kHeader]), buffer_.substr(kHeader + 1, length - 1)};
    buffer_.erase(0, kHeader + length);
    return frame;
}

}  // namespace kvmesh::fabric

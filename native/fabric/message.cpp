#include "fabric/message.h"

#include <cerrno>

#include "fabric/bytes.h"
#include "fabric/fault.h"

namespace kvmesh::fabric {

namespace {

constexpr char kAddressMagic[] = "KVA";
constexpr char kHelloMagic[] = "KVMF";
constexpr uint8_t kAddressVersion = 1;
constexpr uint32_t kMaxFrame = 64 * 1024;

}  // namespace

std::string PeerAddress::encode() const {
    ByteWriter out;
    out.raw(kAddressMagic).u8(kAddressVersion).u64(identity).u64(generation).u16(port).text(host).text(provider);
    return out.take();
}

PeerAddress PeerAddress::decode(const std::string& bytes) {
    ByteReader in(bytes);
    PeerAddress address;
    bool ours = in.raw(3) == kAddressMagic && in.u8() == kAddressVersion;
    address.identity = in.u64();
    address.generation = in.u64();
    address.port = in.u16();
    address.host = in.text();
    address.provider = in.text();
    if (!ours || !in.finished())
        throw SetupError({Status::unreachable, "connect", EINVAL, "this is no fabric address of a known version"});
    return address;
}

std::string Hello::encode() const {
    ByteWriter out;
    out.raw(kHelloMagic).u16(protocol).text(provider).u64(identity).u64(target).u64(generation).u64(floor);
    out.text(endpoint).text(doorbell);
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
    hello.endpoint = in.text();
    hello.doorbell = in.text();
    if (!in.finished()) return std::nullopt;
    return hello;
}

std::string Welcome::encode() const {
    ByteWriter out;
    out.u64(identity).u64(floor).text(endpoint).text(doorbell);
    return out.take();
}

std::optional<Welcome> Welcome::decode(const std::string& payload) {
    ByteReader in(payload);
    Welcome welcome;
    welcome.identity = in.u64();
    welcome.floor = in.u64();
    welcome.endpoint = in.text();
    welcome.doorbell = in.text();
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

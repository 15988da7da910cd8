#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvmesh::fabric {

// The endpoint of one rail, for its peer.
struct RailOffer {
    std::string endpoint;
    std::string doorbell;  // of a provider that needs one, else empty
};

// What `Fabric.address` is: where the control connection listens, and who must answer there.
struct PeerAddress {
    std::string provider;
    std::string host;
    uint16_t port = 0;
    uint64_t identity = 0;
    // Grows with every fence. A peer that was fenced is let in only with an address from after its fence, so that work
    // that was handed out before cannot be done after.
    uint64_t generation = 0;
    // How many it has: a connection has as many rails as the side with more.
    size_t nics = 1;

    std::string encode() const;
    // Throws SetupError (unreachable) where `bytes` is no address of this version.
    static PeerAddress decode(const std::string& bytes);
};

// The control protocol, version 2: frames of a 32-bit length and a type byte. The connecting side says hello with its
// new endpoints, one a rail; the other side answers welcome with its own, or reject with a reason. Then both ping.
enum class MessageType : uint8_t {
    hello = 1,
    welcome = 2,
    reject = 3,
    ping = 4,
    probe = 5,    // do you live, and is our connection good? answered in order with the rest
    alive = 6,    // the answer
    goodbye = 7,  // my endpoints are closed: close yours
    gone = 8,     // they are closed
};

constexpr uint16_t kProtocolVersion = 2;

struct Hello {
    uint16_t protocol = kProtocolVersion;
    std::string provider;
    uint64_t identity = 0;
    uint64_t target = 0;      // the identity this is meant for
    uint64_t generation = 0;  // of the address that was used
    uint64_t floor = 0;       // as in Welcome
    uint16_t nics = 1;        // of this side
    std::vector<RailOffer> rails;

    std::string encode() const;
    static std::optional<Hello> decode(const std::string& payload);
};

struct Welcome {
    uint64_t identity = 0;
    // Addresses of an earlier generation are not for you.
    uint64_t floor = 0;
    std::vector<RailOffer> rails;

    std::string encode() const;
    static std::optional<Welcome> decode(const std::string& payload);
};

// A whole frame. Payloads of reject and goodbye are a sentence, the others' are empty.
std::string frame(MessageType type, const std::string& payload = "");

struct Frame {
    MessageType type;
    std::string payload;
};

// Takes frames off the front of a byte stream.
class FrameReader {
  public:
    void append(const char* bytes, size_t length) { buffer_.append(bytes, length); }
    std::optional<Frame> next();
    // The stream is not of this protocol.
    bool broken() const { return broken_; }

  private:
    std::string buffer_;
    bool broken_ = false;
};

}  // namespace kvmesh::fabric

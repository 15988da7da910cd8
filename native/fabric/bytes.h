#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace kvmesh::fabric {

// Little-endian fields into a string. Every machine kvmesh runs on is little-endian.
class ByteWriter {
  public:
    ByteWriter& u8(uint8_t value) { return put(value); }
    ByteWriter& u16(uint16_t value) { return put(value); }
    ByteWriter& u32(uint32_t value) { return put(value); }
    ByteWriter& u64(uint64_t value) { return put(value); }
    ByteWriter& raw(std::string_view bytes) {
        out_.append(bytes);
        return *this;
    }
    // A 16-bit length, then the bytes.
    ByteWriter& text(std::string_view bytes) { return u16(static_cast<uint16_t>(bytes.size())).raw(bytes); }
    std::string take() { return std::move(out_); }

  private:
    template <typename T>
    ByteWriter& put(T value) {
        char bytes[sizeof value];
        std::memcpy(bytes, &value, sizeof value);
        out_.append(bytes, sizeof value);
        return *this;
    }

    std::string out_;
};

// The reverse. Reading past the end yields zeros and clears `good()`, so that a parser checks once, at its end.
class ByteReader {
  public:
    explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

    uint8_t u8() { return get<uint8_t>(); }
    uint16_t u16() { return get<uint16_t>(); }
    uint32_t u32() { return get<uint32_t>(); }
    uint64_t u64() { return get<uint64_t>(); }
    std::string raw(size_t length) {
        if (bytes_.size() < length) {
            good_ = false;
            return {};
        }
        std::string out(bytes_.substr(0, length));
        bytes_.remove_prefix(length);
        return out;
    }
    std::string text() { return raw(u16()); }
    bool good() const { return good_; }
    // All was there, and nothing is left.
    bool finished() const { return good_ && bytes_.empty(); }

  private:
    template <typename T>
    T get() {
        T value{};
        if (bytes_.size() < sizeof value) {
            good_ = false;
            return value;
        }
        std::memcpy(&value, bytes_.data(), sizeof value);
        bytes_.remove_prefix(sizeof value);
        return value;
    }

    std::string_view bytes_;
    bool good_ = true;
};

}  // namespace kvmesh::fabric

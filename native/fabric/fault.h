#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvmesh::fabric {

// How an operation ended. The numbers are part of the Python face (`_native.pyi`).
enum class Status : uint8_t {
    ok = 0,
    cancelled = 1,
    timed_out = 2,
    peer_lost = 3,
    refused = 4,
    unreachable = 5,
    unavailable = 6,
    failed = 7,
};

// What went wrong: the libfabric or system call, its positive error number, and a sentence.
struct Fault {
    Status status = Status::failed;
    std::string call;
    int code = 0;
    std::string text;
};

// Thrown by set-up only; the data path carries `Fault`s.
class SetupError : public std::runtime_error {
  public:
    explicit SetupError(Fault fault) : std::runtime_error(fault.text), fault_(std::move(fault)) {}
    const Fault& fault() const { return fault_; }

  private:
    Fault fault_;
};

// A fault of a libfabric call that returned `result` (negative).
Fault libfabric_fault(const char* call, long result, Status status = Status::failed);

// A fault of a system call, from `errno`.
Fault system_fault(const char* call, const std::string& what, Status status = Status::failed);

// Throws when a libfabric call did not return 0.
void check(const char* call, long result, Status status = Status::failed);

// CLOCK_MONOTONIC, nanoseconds.
int64_t now_ns();

}  // namespace kvmesh::fabric

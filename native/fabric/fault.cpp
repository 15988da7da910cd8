#include "fabric/fault.h"

#include <rdma/fi_errno.h>
#include <time.h>

#include <cerrno>
#include <cstring>

namespace kvmesh::fabric {

Fault libfabric_fault(const char* call, long result, Status status) {
    int code = static_cast<int>(result < 0 ? -result : result);
    return {status, call, code, std::string(call) + ": " + fi_strerror(code)};
}

Fault system_fault(const char* call, const std::string& what, Status status) {
    int code = errno;
    return {status, call, code, what + ": " + std::strerror(code)};
}

void check(const char* call, long result, Status status) {
    if (result != 0) throw SetupError(libfabric_fault(call, result, status));
}

int64_t now_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

}  // namespace kvmesh::fabric

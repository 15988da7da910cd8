#include "fabric/provider.h"

#include <arpa/inet.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <cstring>

#include "fabric/fault.h"
#include "fabric/socket.h"

namespace kvmesh::fabric {

namespace {

constexpr uint32_t kNewestTested = FI_VERSION(2, 5);
constexpr char kPrefix[] = "libfabric:";

InfoPtr hints_for(const std::string& libfabric_name) {
    InfoPtr hints(fi_allocinfo());
    if (!hints) throw std::bad_alloc();
    hints->caps = FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    // FI_MR_ENDPOINT is not offered: a region has one key for all peers, whose endpoints come and go.
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    // Every call into a domain is made by one thread, the engine's.
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->domain_attr->cq_data_size = sizeof(uint32_t);
    if (!libfabric_name.empty()) hints->fabric_attr->prov_name = strdup(libfabric_name.c_str());
    return hints;
}

bool is_address(const std::string& text) {
    in6_addr address;
    return inet_pton(AF_INET, text.c_str(), &address) == 1 || text.find(':') != std::string::npos;
}

// A verbs device has one name everywhere; efa's domains append the endpoint's type ("rdmap79s0-rdm"); tcp's domain is
// the network interface.
bool is_of_device(const fi_info& info, const std::string& device) {
    const fid_nic* nic = info.nic;
    if (nic != nullptr && nic->device_attr != nullptr && nic->device_attr->name != nullptr)
        if (device == nic->device_attr->name) return true;
    const char* domain = info.domain_attr->name;
    return domain != nullptr && (device == domain || std::string(domain).rfind(device + "-", 0) == 0);
}

bool shm_is_sound() { return fi_version() < FI_VERSION(2, 0); }

}  // namespace

uint32_t api_version() { return std::min(fi_version(), kNewestTested); }

std::string library_version() {
    uint32_t version = fi_version();
    return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
}

Provider Provider::named(const std::string& name) {
    Provider provider;
    provider.name = name;
    if (name == "tcp") {
        // Before 1.18 the native reliable datagram endpoints are a provider of their own. `tcp;ofi_rxm` is no choice:
        // when a connection ends in the middle of a remote write, rxm (1.17) reads an error without a context and
        // crashes.
        provider.libfabric_name = fi_version() < FI_VERSION(1, 18) ? "net" : "tcp";
    } else if (name == "shm") {
        // Seen on 2.5.1: crashes when two endpoints of one process write both ways or the target closes first, and a
        // writer that hangs after its target was closed. "libfabric:shm" is there for who wants to look again.
        if (!shm_is_sound())
            throw SetupError({Status::unavailable, "provider", 0,
                              "shm of libfabric " + library_version() + " is not safe to close while busy: use tcp"});
        provider.libfabric_name = "shm";
    } else if (name.rfind(kPrefix, 0) == 0 && name.size() > std::strlen(kPrefix)) {
        provider.libfabric_name = name.substr(std::strlen(kPrefix));
    } else {
        throw SetupError({Status::unavailable, "provider", 0,
                          "there is no provider '" + name + "': takes tcp, shm or libfabric:<name>"});
    }
    provider.doorbell = provider.libfabric_name == "shm";
    return provider;
}

uint64_t Provider::completion_flags(uint64_t length) const {
    // Reliable connections acknowledge a write when it is in the target's memory.
    if (libfabric_name.rfind("verbs", 0) == 0) return FI_TRANSMIT_COMPLETE;
    // An empty write with delivery completion never completes on 1.17's shm, though its immediate arrives.
    if (libfabric_name == "shm" && length == 0) return 0;
    return FI_DELIVERY_COMPLETE;
}

uint32_t Provider::confirm_every() const {
    constexpr uint32_t kOnStreams = 16;
    return libfabric_name == "net" || libfabric_name == "tcp" ? kOnStreams : 1;
}

InfoPtr Provider::find(const std::string& nic) const {
    InfoPtr hints = hints_for(libfabric_name);
    fi_info* found = nullptr;
    bool named = !is_address(nic);
    bool by_address = !named && libfabric_name.rfind("shm", 0) != 0 && libfabric_name.rfind("efa", 0) != 0;
    if (by_address) listen_on(SocketAddress::parse(nic, 0));  // libfabric takes addresses that are not of this machine.
    int result = by_address
                     ? fi_getinfo(api_version(), nic.c_str(), nullptr, FI_SOURCE | FI_NUMERICHOST, hints.get(), &found)
                     : fi_getinfo(api_version(), nullptr, nullptr, 0, hints.get(), &found);
    InfoPtr all(result == 0 ? found : nullptr);
    for (fi_info* info = all.get(); info != nullptr; info = info->next)
        if (!named || is_of_device(*info, nic)) return InfoPtr(fi_dupinfo(info));
    if (result == 0) result = -FI_ENODATA;
    Fault fault = libfabric_fault("fi_getinfo", result, Status::unavailable);
    fault.text = "libfabric " + library_version() + " has no provider '" + libfabric_name +
                 "' with remote writes and immediates on " + nic + ": " + fi_strerror(-result);
    throw SetupError(fault);
}

std::vector<std::string> present_providers() {
    std::vector<std::string> names;
    InfoPtr hints = hints_for("");
    fi_info* found = nullptr;
    if (fi_getinfo(api_version(), nullptr, nullptr, 0, hints.get(), &found) != 0) return names;
    InfoPtr all(found);
    std::string tcp = Provider::named("tcp").libfabric_name;
    for (fi_info* info = found; info != nullptr; info = info->next) {
        std::string raw = info->fabric_attr->prov_name;
        std::string name = raw == tcp ? "tcp" : raw == "shm" && shm_is_sound() ? "shm" : kPrefix + raw;
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
    return names;
}

}  // namespace kvmesh::fabric

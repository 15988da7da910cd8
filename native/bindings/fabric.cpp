// The Python face of the fabric, and the only file of it that knows Python. `shared/transfer/_native.pyi` describes it.

#include "fabric/fabric.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "fabric/message.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvmesh::fabric;

namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }
std::string from_bytes(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// A sentence may quote what a peer said, which may be anything.
nb::str to_text(const std::string& text) {
    return nb::steal<nb::str>(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

// What Python passes for one paged write.
struct PagedWrite {
    uint64_t lane;
    WritePlan plan;
    double timeout_s;
};

std::unique_ptr<Fabric> open_fabric(const std::string& provider, const std::string& host,
                                    const std::string& numeric_host, uint64_t identity,
                                    const std::vector<std::pair<std::vector<std::string>, std::vector<int>>>& groups,
                                    bool spin, uint32_t window) {
    FabricOptions options{provider, host, numeric_host, identity, {}, {spin, window}};
    for (const auto& [nics, cpus] : groups) options.groups.push_back({nics, cpus});
    return std::make_unique<Fabric>(std::move(options));
}

uint64_t write_bytes(Fabric& fabric, uint64_t lane, std::shared_ptr<Region> source, uint64_t source_offset,
                     const nb::bytes& target, uint64_t target_offset, uint64_t length, uint32_t immediate,
                     double timeout_s) {
    WritePlan plan;
    plan.source = std::move(source);
    plan.target = RemoteRegion::decode(from_bytes(target));
    plan.source_pages = {0};
    plan.target_pages = {0};
    plan.run_bytes = length;
    plan.source_offset = source_offset;
    plan.target_offset = target_offset;
    plan.source_page_stride = plan.source->length();  // The region is one page.
    plan.target_page_stride = plan.target.length;
    plan.num_layers = 1;
    plan.immediate = immediate;
    return fabric.write(lane, std::move(plan), timeout_s);
}

std::vector<uint64_t> arm(Fabric& fabric, LayerWatcher& watcher, uint64_t first,
                          const std::vector<PagedWrite*>& writes) {
    std::vector<std::tuple<uint64_t, WritePlan, double>> plans;
    for (const PagedWrite* write : writes) plans.emplace_back(write->lane, write->plan, write->timeout_s);
    return fabric.arm(watcher, first, std::move(plans));
}

// SetupError becomes `_native.Error(status, call, code, text)`.
void bind_error(nb::module_& module) {
    nb::object type = nb::steal(PyErr_NewException("shared.transfer._native.Error", PyExc_Exception, nullptr));
    module.attr("Error") = type;
    nb::register_exception_translator(
        [](const std::exception_ptr& raised, void* payload) {
            try {
                std::rethrow_exception(raised);
            } catch (const SetupError& error) {
                const Fault& fault = error.fault();
                nb::tuple arguments =
                    nb::make_tuple(static_cast<int>(fault.status), fault.call, fault.code, to_text(fault.text));
                PyErr_SetObject(static_cast<PyObject*>(payload), arguments.ptr());
            }
        },
        type.ptr());
}

void bind_event(nb::module_& module) {
    nb::class_<Event>(module, "Event")
        .def_prop_ro("kind", [](const Event& event) { return static_cast<int>(event.kind); })
        .def_prop_ro("status", [](const Event& event) { return static_cast<int>(event.fault.status); })
        .def_prop_ro("call", [](const Event& event) { return event.fault.call; })
        .def_prop_ro("code", [](const Event& event) { return event.fault.code; })
        .def_prop_ro("text", [](const Event& event) { return to_text(event.fault.text); })
        .def_prop_ro("token", [](const Event& event) { return event.token; })
        .def_prop_ro("lane", [](const Event& event) { return event.lane; })
        .def_prop_ro("peer", [](const Event& event) { return event.peer; })
        .def_prop_ro("writes", [](const Event& event) { return event.writes; })
        .def_prop_ro("bytes", [](const Event& event) { return event.bytes; })
        .def_prop_ro("layers", [](const Event& event) {
            std::vector<std::pair<int64_t, int64_t>> layers;
            for (const LayerTiming& layer : event.layers) layers.emplace_back(layer.posted_ns, layer.completed_ns);
            return layers;
        });
}

void bind_values(nb::module_& module) {
    nb::class_<Region>(module, "Region")
        .def_prop_ro("length", &Region::length)
        .def_prop_ro("descriptor", [](const Region& region) { return to_bytes(region.remote().encode()); });
    nb::class_<PagedWrite>(module, "PagedWrite")
        .def(
            "__init__",
            [](PagedWrite* self, uint64_t lane, std::shared_ptr<Region> source, std::vector<uint32_t> source_pages,
               const nb::bytes& target, std::vector<uint32_t> target_pages, uint64_t run_bytes, uint64_t source_begin,
               uint64_t target_begin, uint64_t source_offset, uint64_t target_offset, uint64_t source_page_stride,
               uint64_t target_page_stride, uint64_t source_layer_stride, uint64_t target_layer_stride,
               uint32_t num_layers, uint32_t immediate, double timeout_s) {
                WritePlan plan;
                plan.source = std::move(source);
                plan.target = RemoteRegion::decode(from_bytes(target));
                plan.source_pages = std::move(source_pages);
                plan.target_pages = std::move(target_pages);
                plan.run_bytes = run_bytes;
                plan.source_begin = source_begin;
                plan.target_begin = target_begin;
                plan.source_offset = source_offset;
                plan.target_offset = target_offset;
                plan.source_page_stride = source_page_stride;
                plan.target_page_stride = target_page_stride;
                plan.source_layer_stride = source_layer_stride;
                plan.target_layer_stride = target_layer_stride;
                plan.num_layers = num_layers;
                plan.immediate = immediate;
                new (self) PagedWrite{lane, std::move(plan), timeout_s};
            },
            nb::kw_only(), "lane"_a, "source"_a, "source_pages"_a, "target"_a, "target_pages"_a, "run_bytes"_a,
            "source_begin"_a, "target_begin"_a, "source_offset"_a, "target_offset"_a, "source_page_stride"_a,
            "target_page_stride"_a, "source_layer_stride"_a, "target_layer_stride"_a, "num_layers"_a, "immediate"_a,
            "timeout_s"_a);
    nb::class_<LayerWatcher>(module, "LayerWatcher")
        .def("disarm", &LayerWatcher::disarm)
        .def("close", &LayerWatcher::close, Release());
    nb::class_<FabricStats>(module, "Stats")
        .def_prop_ro("posted", [](const FabricStats& stats) { return stats.all.posted; })
        .def_prop_ro("completed", [](const FabricStats& stats) { return stats.all.completed; })
        .def_prop_ro("retries", [](const FabricStats& stats) { return stats.all.retries; })
        .def_prop_ro("nics",
                     [](const FabricStats& stats) {
                         std::vector<std::pair<uint64_t, uint64_t>> nics;
                         for (const Stats& nic : stats.nics) nics.emplace_back(nic.posted, nic.bytes);
                         return nics;
                     })
        .def_prop_ro("arrived", [](const FabricStats& stats) { return stats.arrived; })
        .def_prop_ro("late", [](const FabricStats& stats) { return stats.late; });
}

void bind_fabric(nb::module_& module) {
    nb::class_<Fabric>(module, "Fabric")
        .def("close", &Fabric::close, Release())
        .def("address", [](const Fabric& fabric) { return to_bytes(fabric.address()); })
        .def_prop_ro("event_fd", &Fabric::event_fd)
        .def_prop_ro("stuck", &Fabric::stuck)
        .def("poll", &Fabric::drain)
        .def("stats", &Fabric::stats, Release())
        .def("register", &Fabric::register_region, Release(), "fd"_a, "length"_a)
        .def_prop_ro("grants", &Fabric::grants)
        .def("grant", &Fabric::grant, Release(), "region"_a, "offset"_a, "length"_a)
        .def("unregister", &Fabric::close_region, Release(), "region"_a)
        .def(
            "connect",
            [](Fabric& fabric, const nb::bytes& address, const std::string& numeric_host, double timeout_s) {
                return fabric.connect(from_bytes(address), numeric_host, timeout_s);
            },
            "address"_a, "numeric_host"_a, "timeout_s"_a)
        .def("fence", &Fabric::fence, "identity"_a)
        .def("expect", &Fabric::expect, "immediate"_a, "count"_a)
        .def("forget", &Fabric::forget, "immediate"_a, "token"_a)
        .def("write", &write_bytes, nb::kw_only(), "lane"_a, "source"_a, "source_offset"_a, "target"_a,
             "target_offset"_a, "length"_a, "immediate"_a, "timeout_s"_a)
        .def(
            "write_pages",
            [](Fabric& fabric, const PagedWrite& write) {
                return fabric.write(write.lane, write.plan, write.timeout_s);
            },
            "write"_a)
        .def("cancel", &Fabric::cancel, "token"_a)
        .def("watch", &Fabric::watch, "counter_fd"_a, "poll_ns"_a)
        .def("arm", &arm, "watcher"_a, "first"_a, "writes"_a);
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "The fabric: one-sided paged writes with immediates over libfabric. See shared/transfer/fabric.py.";
    // A process may end with its fabric open; the kernel takes everything back.
    nb::set_leak_warnings(false);
    bind_error(module);
    bind_event(module);
    bind_values(module);
    bind_fabric(module);
    module.def("open", &open_fabric, Release(), nb::kw_only(), "provider"_a, "host"_a, "numeric_host"_a, "identity"_a,
               "groups"_a, "spin"_a, "window"_a);
    module.def("library_version", &library_version);
    module.def("providers", &present_providers, Release());
    module.def(
        "address_host",
        [](const nb::bytes& address) { return to_bytes(PeerAddress::decode(from_bytes(address)).host); }, "address"_a);
    module.def(
        "address_identity", [](const nb::bytes& address) { return PeerAddress::decode(from_bytes(address)).identity; },
        "address"_a);
}

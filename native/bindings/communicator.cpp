// shared.models._kernels.Communicator: see shared/models/collective.py.
#include "communicator.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <vector>

#include "arrays.h"

using namespace nb::literals;

namespace {

using namespace kvmesh;

// One rank's end of the memory of a group; keeps it alive, and memory for rows that are received, which is used again
// once nobody looks at them: as many as are looked at at once.
struct CommunicatorHolder {
    Vector<uint8_t> memory;
    Communicator ends;
    std::vector<std::shared_ptr<Received>> kept;

    std::shared_ptr<Received> unused() {
        for (const std::shared_ptr<Received>& one : kept)
            if (one.use_count() == 1) return one;
        return kept.emplace_back(std::make_shared<Received>());
    }
};

nb::object received_array(const std::shared_ptr<Received>& received, int64_t width) {
    nb::capsule owner(new std::shared_ptr<Received>(received),
                      [](void* pointer) noexcept { delete static_cast<std::shared_ptr<Received>*>(pointer); });
    size_t shape[] = {received->rows.size() / width, static_cast<size_t>(width)};
    nb::ndarray<nb::numpy, float, nb::ndim<2>> array(received->rows.data(), 2, shape, owner);
    return nb::cast(array);
}

nb::object all_to_all(CommunicatorHolder& self, const Matrix<const float>& values, const Vector<const int64_t>& counts,
                      double timeout_s) {
    require(static_cast<int>(counts.shape(0)) == self.ends.ranks(), "one count a rank");
    int64_t total = 0;
    for (size_t i = 0; i < counts.shape(0); ++i) {
        require(counts.data()[i] >= 0, "a count is 0 or more");
        total += counts.data()[i];
    }
    require(total == rows(values), "the counts add up to the rows");
    std::shared_ptr<Received> received = self.unused();
    std::optional<int> missing;
    {
        nb::gil_scoped_release unlocked;
        missing = self.ends.all_to_all(values.data(), columns(values), counts.data(), *received, timeout_s);
    }
    if (missing) return nb::cast(*missing);
    return nb::make_tuple(received_array(received, columns(values)), received->counts);
}

void check_gather(const Communicator& ends, const Matrix<const float>& values, const Matrix<float>& out) {
    require(ends.rank() != 0 || out.size() == values.size() * ends.ranks(), "out has room for every rank's values");
}

}  // namespace

void bind_communicator(nb::module_& m) {
    nb::class_<CommunicatorHolder>(m, "Communicator", "One rank's end of the memory that a group of ranks shares.")
        .def(
            "__init__",
            [](CommunicatorHolder* self, const Vector<uint8_t>& memory, int rank, int ranks) {
                Communicator ends(reinterpret_cast<char*>(memory.data()), static_cast<int64_t>(memory.shape(0)), rank,
                                  ranks);
                new (self) CommunicatorHolder{memory, ends, {}};
            },
            "memory"_a, "rank"_a, "ranks"_a)
        .def(
            "all_reduce_sum",
            [](CommunicatorHolder& self, const Matrix<float>& values, double timeout_s) {
                nb::gil_scoped_release unlocked;
                return self.ends.all_reduce_sum(values.data(), static_cast<int64_t>(values.size()), timeout_s);
            },
            "values"_a, "timeout_s"_a, "Add the other ranks' values, in place; the rank that is missing, or None.")
        .def(
            "gather",
            [](CommunicatorHolder& self, const Matrix<const float>& values, const Matrix<float>& out,
               double timeout_s) {
                check_gather(self.ends, values, out);
                nb::gil_scoped_release unlocked;
                return self.ends.gather(values.data(), static_cast<int64_t>(values.size()), out.data(), timeout_s);
            },
            "values"_a, "out"_a, "timeout_s"_a,
            "All ranks' values into rank 0's out, in the order of ranks; the rank that is missing, or None.")
        .def(
            "all_to_all", &all_to_all, "rows"_a, "counts"_a, "timeout_s"_a,
            "Rows sorted by destination, counts[d] of them to rank d; what came, in the order of sources, and how many "
            "from each; or the rank that is missing.")
        .def(
            "barrier",
            [](CommunicatorHolder& self, double timeout_s) {
                nb::gil_scoped_release unlocked;
                return self.ends.barrier(timeout_s);
            },
            "timeout_s"_a, "Wait for all ranks; the rank that is missing, or None.");
}

// NumPy arrays as the kernels' bindings take them, and the bindings that are in files of their own.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>

namespace nb = nanobind;

template <class T>
using Vector = nb::ndarray<T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

inline void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

template <class M>
int rows(const M& matrix) {
    return static_cast<int>(matrix.shape(0));
}

template <class M>
int columns(const M& matrix) {
    return static_cast<int>(matrix.shape(1));
}

void bind_communicator(nb::module_& m);

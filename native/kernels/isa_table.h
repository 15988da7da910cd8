// The body of isa_*.cpp: the table of functions of one instruction set.
#pragma once

#include "attention_tile.h"
#include "elementwise.h"
#include "gemm.h"
#include "isa.h"

namespace kvmesh::KVMESH_ISA {

const Kernels table = {
    kRows,    panel<float>,    panel<uint16_t>,   widen,     pack, rms_norm, silu_mul,
    gelu_mul, softmax_weights, attention_scratch, attention,
};

}  // namespace kvmesh::KVMESH_ISA

#include "isa.h"

#include <stdexcept>

namespace kvmesh {

bool has_isa(Isa isa) {
#ifdef KVMESH_X86
    if (isa == Isa::avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (isa == Isa::avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return isa == Isa::generic;
}

Isa best_isa() {
    if (has_isa(Isa::avx512)) return Isa::avx512;
    return has_isa(Isa::avx2) ? Isa::avx2 : Isa::generic;
}

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::avx512:
            return "avx512";
        case Isa::avx2:
            return "avx2";
        case Isa::generic:
            break;
    }
    return "generic";
}

Isa parse_isa(const std::string& name) {
    if (name == "auto") return best_isa();
    for (Isa isa : {Isa::avx512, Isa::avx2, Isa::generic})
        if (name == isa_name(isa)) {
            if (!has_isa(isa)) throw std::runtime_error("this processor has no " + name);
            return isa;
        }
    throw std::invalid_argument("instruction set " + name + ": takes auto, avx512, avx2 or generic");
}

const Kernels& kernels(Isa isa) {
#ifdef KVMESH_X86
    if (isa == Isa::avx512) return avx512::table;
    if (isa == Isa::avx2) return avx2::table;
#endif
    (void)isa;
    return generic::table;
}

}  // namespace kvmesh

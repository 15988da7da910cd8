#define KVMESH_ISA avx512
#include "isa_table.h"

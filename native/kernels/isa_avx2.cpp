#define KVMESH_ISA avx2
#include "isa_table.h"

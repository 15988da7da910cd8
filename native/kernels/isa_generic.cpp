#define KVMESH_ISA generic
#include "isa_table.h"

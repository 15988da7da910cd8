// The 64-bit layer counter in shared memory: see shared/engine/counter.py for the contract.
#pragma once

#include <cstdint>

namespace kvmesh {

// Adds 1 with release order, then wakes every waiter of the shared futex on the low half. `word` is 8-byte aligned.
uint64_t advance(uint64_t* word);
uint64_t read_counter(const uint64_t* word);

// Sleeps until the counter is above `value` or `timeout_s` seconds have passed; returns what it is then.
uint64_t wait_above(const uint64_t* word, uint64_t value, double timeout_s);

}  // namespace kvmesh

// Sums over the processes of a tensor parallel group, through memory they all map. See shared/models/collective.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace kvmesh {

// One rank's end. The memory, zeros at first, is [rank] arrivals, a cache line pair each, then [2][rank] slots that
// share what is left. Every rank makes the same calls in the same order, and one thread of a rank makes them.
class AllReduce {
  public:
    // `memory` is 8-byte aligned. Throws std::invalid_argument where no slot of a cache line fits. Takes its place:
    // from then on the others can see that this process lives.
    AllReduce(char* memory, int64_t bytes, int rank, int ranks);

    // values += the other ranks' values, added in the order of ranks, so that all get the same bits. Nothing where all
    // arrived; otherwise the rank that has ended, or has not arrived `timeout_s` seconds after this one. The values and
    // the group are of no use then.
    std::optional<int> sum(float* values, int64_t count, double timeout_s);

    // Waits for all ranks; what each wrote before is visible to all after.
    std::optional<int> barrier(double timeout_s);

  private:
    struct alignas(128) Arrival {
        uint64_t count;  // barriers entered; its low half is a futex
        int64_t process;
    };

    float* slot(int rank) const;
    bool wait(const Arrival& arrival, double timeout_s) const;

    Arrival* arrivals_;
    char* slots_;
    int64_t slot_floats_;
    int rank_, ranks_, spins_;
    uint64_t entered_ = 0;
};

}  // namespace kvmesh

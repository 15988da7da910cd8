// Collectives over the processes of one instance, through memory they all map. See shared/models/collective.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace kvmesh {

// What a rank received: `counts[s]` rows from rank s, in the order of ranks, and of each in the order it sent them in.
struct Received {
    std::vector<float> rows;
    std::vector<int64_t> counts;
};

// One rank's end. The memory, zeros at first, is [rank] arrivals, a cache line pair each, then [2][rank] slots that
// share what is left. Every rank makes the same calls in the same order, and one thread of a rank makes them.
//
// A call returns nothing where all arrived; otherwise the rank that has ended, or has not arrived `timeout_s` seconds
// after this one. What the call was to fill, and the group, are of no use then.
class Communicator {
  public:
    // `memory` is 8-byte aligned. Throws std::invalid_argument where no slot of a cache line fits. Takes its place:
    // from then on the others can see that this process lives.
    Communicator(char* memory, int64_t bytes, int rank, int ranks);

    int rank() const { return rank_; }
    int ranks() const { return ranks_; }

    // Waits for all ranks; what each wrote before is visible to all after.
    std::optional<int> barrier(double timeout_s);

    // values += the other ranks' values, added in the order of ranks, so that all get the same bits.
    std::optional<int> all_reduce_sum(float* values, int64_t count, double timeout_s);

    // out[r] = rank r's `count` values, in rank 0; elsewhere `out` is not touched.
    std::optional<int> gather(const float* values, int64_t count, float* out, double timeout_s);

    // Of `rows`, of `width` floats each and sorted by destination, counts[d] go to rank d. `width` is the same in all
    // ranks; counts are anything, also zero everywhere. Throws std::invalid_argument, in all ranks and before anything
    // is sent, where a slot does not hold a row.
    std::optional<int> all_to_all(const float* rows, int64_t width, const int64_t* counts, Received& received,
                                  double timeout_s);

  private:
    struct alignas(128) Arrival {
        uint64_t count;  // barriers entered; its low half is a futex
        int64_t process;
    };
    struct Exchange;

    char* slot(int rank) const;
    bool wait(const Arrival& arrival, double timeout_s) const;

    Arrival* arrivals_;
    char* slots_;
    int64_t slot_bytes_;
    int rank_, ranks_, spins_;
    uint64_t entered_ = 0;
};

}  // namespace kvmesh

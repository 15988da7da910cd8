// Communicator::all_to_all. In turn t every rank writes rows [t * most, (t + 1) * most) of those it sends into its
// slot, which begins with its counts; after the barrier each takes what is for it out of every slot. The rank that
// sends most decides how many turns there are, and all know it from the first one's counts.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "communicator.h"

namespace kvmesh {

namespace {

constexpr int64_t kLine = 64;

}  // namespace

// One call, as this rank sees it.
struct Communicator::Exchange {
    int rank, ranks;
    int64_t width, header, most;  // floats of a row, bytes of the counts, rows of a turn
    std::vector<int64_t> totals;  // by source: rows it sends to whomever
    std::vector<int64_t> begins;  // by source: the first of its rows that is for this rank
    std::vector<int64_t> places;  // by source: where that one goes in what is received

    int64_t row_bytes() const { return width * static_cast<int64_t>(sizeof(float)); }

    void write(char* slot, const float* rows, const int64_t* counts, int64_t total, int64_t turn) const {
        int64_t first = turn * most, count = std::min(most, total - first);
        if (turn == 0) std::memcpy(slot, counts, ranks * sizeof(int64_t));
        if (count > 0) std::memcpy(slot + header, rows + first * width, count * row_bytes());
    }

    // What all ranks send, out of the first turn's slots.
    void learn(const char* slots, int64_t slot_bytes, Received& received) {
        int64_t place = 0;
        std::vector<int64_t> counts(ranks);
        for (int source = 0; source < ranks; ++source) {
            std::memcpy(counts.data(), slots + source * slot_bytes, ranks * sizeof(int64_t));
            totals.push_back(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
            begins.push_back(std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0}));
            places.push_back(place);
            place += counts[rank];
            received.counts[source] = counts[rank];
        }
        received.rows.resize(place * width);
    }

    void read(const char* slots, int64_t slot_bytes, int64_t turn, Received& received) const {
        for (int source = 0; source < ranks; ++source) {
            int64_t begin = begins[source], first = std::max(begin, turn * most);
            int64_t end = std::min(begin + received.counts[source], (turn + 1) * most);
            if (first >= end) continue;
            const char* from = slots + source * slot_bytes + header + (first - turn * most) * row_bytes();
            std::memcpy(received.rows.data() + (places[source] + first - begin) * width, from,
                        (end - first) * row_bytes());
        }
    }

    int64_t turns() const {
        int64_t longest = *std::max_element(totals.begin(), totals.end());
        return std::max<int64_t>(1, (longest + most - 1) / most);
    }
};

std::optional<int> Communicator::all_to_all(const float* rows, int64_t width, const int64_t* counts, Received& received,
                                            double timeout_s) {
    int64_t header = (ranks_ * static_cast<int64_t>(sizeof(int64_t)) + kLine - 1) / kLine * kLine;
    if (width < 1) throw std::invalid_argument("a row has at least one number");
    Exchange exchange{rank_, ranks_, width, header, 0, {}, {}, {}};
    exchange.most = (slot_bytes_ - header) / exchange.row_bytes();
    if (exchange.most < 1) throw std::invalid_argument("a row is larger than a slot of the shared memory");
    int64_t total = std::accumulate(counts, counts + ranks_, int64_t{0});
    received.counts.assign(ranks_, 0);
    for (int64_t turn = 0, turns = 1; turn < turns; ++turn) {
        const char* slots = slot(0);
        exchange.write(slot(rank_), rows, counts, total, turn);
        if (auto missing = barrier(timeout_s)) return missing;
        if (turn == 0) exchange.learn(slots, slot_bytes_, received);
        exchange.read(slots, slot_bytes_, turn, received);
        turns = exchange.turns();
    }
    return std::nullopt;
}

}  // namespace kvmesh

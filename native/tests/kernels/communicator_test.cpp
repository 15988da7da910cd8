#include "communicator.h"

#include <algorithm>
#include <stdexcept>
#include <thread>

#include "check.h"

using namespace kvmesh;

namespace {

constexpr double kDeadline = 60.0;
constexpr int64_t kSlot = 4096;

// The memory of a group, and every rank's part of a call, each in a thread: a sanitizer sees what a barrier leaves
// open.
class Group {
  public:
    explicit Group(int ranks) : ranks_(ranks), memory_((ranks * (128 + 2 * kSlot) + 127) / 128) {}

    template <class Work>
    void run(Work work) {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < ranks_; ++rank)
            threads.emplace_back([&, rank] {
                Communicator ends(reinterpret_cast<char*>(memory_.data()), ranks_ * (128 + 2 * kSlot), rank, ranks_);
                work(ends);
            });
        for (std::thread& thread : threads) thread.join();
    }

  private:
    struct alignas(128) Line {
        char bytes[128];
    };
    int ranks_;
    std::vector<Line> memory_;
};

void sums_and_gathers(int ranks) {
    Group(ranks).run([&](Communicator& ends) {
        for (int64_t count : {1, 7, 1024, 1025, 5000}) {
            std::vector<float> values(count), all(ends.rank() ? 0 : count * ranks);
            for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(ends.rank() + 1) * static_cast<float>(i);
            CHECK(!ends.gather(values.data(), count, all.data(), kDeadline));
            CHECK(!ends.all_reduce_sum(values.data(), count, kDeadline));
            for (int64_t i = 0; i < count; ++i)
                CHECK(values[i] == static_cast<float>(i) * static_cast<float>(ranks * (ranks + 1) / 2));
            for (size_t i = 0; i < all.size(); ++i)
                CHECK(all[i] == static_cast<float>(i / count + 1) * static_cast<float>(i % count));
        }
    });
}

// What rank `from` sends to rank `to` in a round: nothing, one row, or more than fit into one turn or several.
int64_t count_of(int from, int to, int round) {
    constexpr int64_t kCounts[] = {0, 1, 17, 0, 300, 3};
    return kCounts[(from * 5 + to * 3 + round) % 6];
}

void all_to_all(int ranks, int64_t width) {
    Group(ranks).run([&](Communicator& ends) {
        Received received;
        for (int round = 0; round < 12; ++round) {
            std::vector<int64_t> counts;
            std::vector<float> rows;
            for (int to = 0; to < ranks; ++to) {
                counts.push_back(round % 4 == 3 && ends.rank() == 0 ? 0 : count_of(ends.rank(), to, round));
                for (int64_t i = 0; i < counts.back() * width; ++i)
                    rows.push_back(static_cast<float>(ends.rank() * 1000003 + to * 10007 + i + round));
            }
            CHECK(!ends.all_to_all(rows.data(), width, counts.data(), received, kDeadline));
            const float* at = received.rows.data();
            for (int from = 0; from < ranks; ++from) {
                int64_t count = round % 4 == 3 && from == 0 ? 0 : count_of(from, ends.rank(), round);
                CHECK(received.counts[from] == count);
                for (int64_t i = 0; i < count * width; ++i)
                    CHECK(*at++ == static_cast<float>(from * 1000003 + ends.rank() * 10007 + i + round));
            }
            CHECK(at == received.rows.data() + received.rows.size());
        }
    });
}

void what_does_not_fit_is_refused() {
    Group(1).run([&](Communicator& ends) {
        std::vector<float> row(kSlot / sizeof(float) + 1);
        int64_t count = 1;
        Received received;
        int64_t wide = kSlot / static_cast<int64_t>(sizeof(float)), fits = wide - 16;
        CHECK_THROWS(std::invalid_argument, ends.all_to_all(row.data(), wide, &count, received, kDeadline));
        CHECK_THROWS(std::invalid_argument, ends.all_to_all(row.data(), 0, &count, received, kDeadline));
        CHECK(!ends.all_to_all(row.data(), fits, &count, received, kDeadline));
    });
    alignas(128) char small[256] = {};
    CHECK_THROWS(std::invalid_argument, Communicator(small, sizeof(small), 0, 2));
}

void a_rank_that_does_not_come_is_named() {
    Group(3).run([&](Communicator& ends) {
        if (ends.rank() == 2) return;
        std::vector<int64_t> counts{0, 1, 0};
        float row = 1.0f;
        Received received;
        CHECK(ends.all_to_all(&row, 1, counts.data(), received, 0.05) == 2);
    });
}

}  // namespace

int main() {
    for (int ranks : {1, 2, 3, 4}) {
        sums_and_gathers(ranks);
        all_to_all(ranks, 1);
        all_to_all(ranks, 50);
    }
    what_does_not_fit_is_refused();
    a_rank_that_does_not_come_is_named();
}

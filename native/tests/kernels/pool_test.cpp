#include "pool.h"

#include <poll.h>

#include <ctime>
#include <stdexcept>

#include "check.h"

using kvmesh::Pool;

namespace {

// Plain memory is written by the caller before a job, by the items within, and read after: a sanitizer sees any gap.
void every_item_runs_once(int threads) {
    Pool pool(threads);
    CHECK(pool.threads() == threads);
    std::vector<int> counts(300), threads_seen(300);
    for (int round = 0; round < 3000; ++round) {
        int items = round % 300;
        for (int i = 0; i < items; ++i) counts[i] = round;
        pool.run(items, [&](int64_t item, int thread) {
            counts[item] += 1;
            threads_seen[item] = thread;
        });
        for (int i = 0; i < items; ++i) {
            CHECK(counts[i] == round + 1);
            CHECK(threads_seen[i] >= 0 && threads_seen[i] < threads);
        }
    }
}

double cpu_seconds() {
    timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void an_idle_pool_uses_no_processor() {
    Pool pool(4);
    std::atomic<int> ran{0};
    for (int round = 0; round < 20; ++round) {
        pool.run(8, [&](int64_t, int) { ran.fetch_add(1); });
        double before = cpu_seconds();
        poll(nullptr, 0, round == 19 ? 500 : 1);  // workers go to sleep, and must wake for the next round
        if (round == 19) CHECK(cpu_seconds() - before < 0.1);
    }
    CHECK(ran.load() == 160);
}

void pools_end_whatever_they_did_last() {
    for (int i = 0; i < 50; ++i) {
        Pool pool(1 + i % 4);
        if (i % 2) pool.run(5, [](int64_t, int) {});
    }
}

}  // namespace

int main() {
    for (int threads : {1, 2, 3, 8}) every_item_runs_once(threads);
    an_idle_pool_uses_no_processor();
    pools_end_whatever_they_did_last();
    CHECK_THROWS(std::invalid_argument, Pool(0));
}

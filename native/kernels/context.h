// What every operation needs: threads, an instruction set, and scratch memory that is kept between calls.
#pragma once

#include <vector>

#include "buffer.h"
#include "isa.h"
#include "pool.h"
#include "store.h"

namespace kvmesh {

// Memory that grows to the largest request and is then reused.
template <class T>
class Arena {
  public:
    T* get(int64_t count) {
        if (count > size_) {
            data_.reset();
            data_ = allocate<T>(count);
            size_ = count;
        }
        return data_.get();
    }

  private:
    Buffer<T> data_;
    int64_t size_ = 0;
};

class Context {
  public:
    Context(int threads, Isa isa) : pool(threads), isa(isa), kernels(kvmesh::kernels(isa)), per_thread(threads) {}

    Pool pool;
    const Isa isa;
    const Kernels& kernels;
    Store store;          // of weights
    Arena<float> packed;  // activations of the linear that runs
    Arena<float> routed;  // activations of the expert that runs

    struct alignas(64) Thread {
        Arena<float> scratch;
        Arena<float> tile;
    };
    std::vector<Thread> per_thread;
};

}  // namespace kvmesh

// Memory for weights: large blocks, which the kernel may back with huge pages, cut into pieces.
#pragma once

#include <memory>

#include "buffer.h"

namespace kvmesh {

// A piece keeps its block alive. Used by one thread at a time.
class Store {
  public:
    template <class T>
    std::shared_ptr<T[]> take(int64_t count) {
        int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + kLine - 1) / kLine * kLine;
        if (bytes > size_ - used_) {
            size_ = bytes > kBlockBytes ? bytes : kBlockBytes;
            block_ = std::shared_ptr<char[]>(allocate<char>(size_));
            used_ = 0;
        }
        auto* piece = reinterpret_cast<T*>(block_.get() + used_);
        used_ += bytes;
        return std::shared_ptr<T[]>(block_, piece);
    }

  private:
    static constexpr int64_t kLine = 64;
    static constexpr int64_t kBlockBytes = 32 << 20;

    std::shared_ptr<char[]> block_;
    int64_t size_ = 0, used_ = 0;
};

}  // namespace kvmesh

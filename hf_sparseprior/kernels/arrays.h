// Arrays of programs other than torch: contiguous, in the program's memory.

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"

namespace sparseprior {

enum class Dtype : int32_t { float32, int32, int64, bfloat16, other };
constexpr Dtype float32() { return Dtype::float32; }
constexpr Dtype bfloat16() { return Dtype::bfloat16; }  // of no program's arrays
constexpr Dtype int32() { return Dtype::int32; }
constexpr Dtype int64() { return Dtype::int64; }

inline void print(std::ostream& to, Dtype dtype) {
  constexpr const char* NAMES[] = {"float32", "int32", "int64", "bfloat16", "another"};
  to << NAMES[(int)dtype];
}

// An array, which the program owns.
class Tensor {
 public:
  Tensor(const void* data, std::vector<int64_t> sizes, Dtype dtype)
      : data_((void*)data), sizes_(std::move(sizes)), strides_(sizes_.size()), dtype_(dtype) {
    for (int64_t i = dim(), step = 1; i--; step *= sizes_[i]) strides_[i] = step;
  }

  void* data() const { return data_; }
  Dtype dtype() const { return dtype_; }
  Sizes sizes() const { return sizes_; }
  int64_t dim() const { return (int64_t)sizes_.size(); }
  int64_t size(int64_t i) const { return sizes_[i]; }
  int64_t stride(int64_t i) const { return strides_[i]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t size : sizes_) count *= size;
    return count;
  }
  bool is_contiguous() const { return !turned_; }
  // Of (batch, tokens, heads, head width), as projections write it: the same memory as (batch, heads, tokens, head width).
  Tensor heads_first() const {
    SPARSEPRIOR_CHECK(dim() == 4, "an array of shape ", sizes(), " must be (batch, tokens, heads, head width)");
    Tensor x = *this;
    std::swap(x.sizes_[1], x.sizes_[2]);
    std::swap(x.strides_[1], x.strides_[2]);
    x.turned_ = true;
    return x;
  }

 private:
  void* data_;
  std::vector<int64_t> sizes_, strides_;
  Dtype dtype_;
  bool turned_ = false;
};

}  // namespace sparseprior

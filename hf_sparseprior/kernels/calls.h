// Arguments of operators, checked and made into what the kernels take, for every host alike. A host includes this after a
// header of its own, which has its Tensor, its Dtype, and the four types (torch_abi.h or arrays.h).

#pragma once

#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "checks.h"
#include "kernels.h"

namespace sparseprior {

using std::optional;

// ---- tensors --------------------------------------------------------------------------------------------------------

inline View view(const Tensor& x) {
  return {(char*)x.data(), x.stride(0), x.stride(1), x.stride(2), x.stride(3), x.size(3), x.dtype() == bfloat16()};
}

// The values of a tensor of any strides, in order.
template <typename T>
inline void copy_values(const Tensor& x, T* to) {
  std::vector<int64_t> index(x.dim(), 0);
  for (int64_t left = x.numel(); left > 0; --left) {
    int64_t place = 0;
    for (int64_t i = 0; i < x.dim(); ++i) place += index[i] * x.stride(i);
    *to++ = ((const T*)x.data())[place];
    for (int64_t i = x.dim(); i-- && ++index[i] == x.size(i);) index[i] = 0;
  }
}

// Values of tensors of any strides, which live as long as this object.
class Values {
 public:
  template <typename T>
  const T* of(const Tensor& x) {
    if (x.is_contiguous()) return (const T*)x.data();
    kept_.emplace_back(new char[x.numel() * sizeof(T)]);
    copy_values(x, (T*)kept_.back().get());
    return (const T*)kept_.back().get();
  }
  const float* of(const optional<Tensor>& x) { return x ? of<float>(*x) : nullptr; }

 private:
  std::vector<std::unique_ptr<char[]>> kept_;
};

inline bool is(const Tensor& x, Sizes sizes, Dtype dtype) {
  return std::ranges::equal(x.sizes(), sizes) && x.dtype() == dtype;
}
inline void check_is(const Tensor& x, Sizes expected, Dtype dtype, const char* name) {
  SPARSEPRIOR_CHECK(
      is(x, expected, dtype), name, " of shape ", x.sizes(), " and dtype ", x.dtype(), " must be ", expected, " and ",
      dtype);
}
inline void check_is(const Tensor& x, List sizes, Dtype dtype, const char* name) {
  check_is(x, Sizes(sizes.begin(), sizes.size()), dtype, name);
}
inline void check_like(const Tensor& q, const Tensor& other, const char* name) {
  SPARSEPRIOR_CHECK(
      is(other, q.sizes(), q.dtype()), name, " of shape ", other.sizes(), " and dtype ", other.dtype(),
      " must be as q, ", q.sizes(), " and ", q.dtype());
}
inline void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, int64_t prefix) {
  SPARSEPRIOR_CHECK(q.dim() == 4, "q of shape ", q.sizes(), " must be (batch, heads, tokens, head width)");
  SPARSEPRIOR_CHECK(
      q.dtype() == float32() || q.dtype() == bfloat16(), "q of dtype ", q.dtype(), " must be float32 or bfloat16");
  check_like(q, k, "k");
  check_like(q, v, "v");
  SPARSEPRIOR_CHECK(
      prefix >= 0 && prefix < q.size(2), prefix, " prefix tokens must be fewer than the tokens, ", q.size(2));
}

// The lowest and highest of some numbers.
inline std::pair<int32_t, int32_t> range(const int32_t* numbers, int64_t count) {
  const auto [low, high] = std::minmax_element(numbers, numbers + count);
  return {*low, *high};
}

// ---- along diagonals ------------------------------------------------------------------------------------------------

// The optional arguments of a decay: all or none.
struct DiagonalWeights {
  const optional<Tensor>&pairs, &begin, &prefix, &self;
};

inline DiagonalInputs diagonal_inputs(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets, const Tensor& counts, int64_t prefix,
    double scale, bool zero_fill, const DiagonalWeights& weights, Values& values) {
  check_inputs(q, k, v, prefix);
  const int64_t H = q.size(1), N = q.size(2) - prefix;
  check_is(counts, {H}, int32(), "counts");
  const int32_t* count = values.of<int32_t>(counts);
  int64_t total = 0;
  for (int64_t h = 0; h < H; ++h) {
    SPARSEPRIOR_CHECK(count[h] >= 0, "counts must be 0 or more, got ", count[h]);
    total += count[h];
  }
  check_is(offsets, {total}, int32(), "offsets");
  const int32_t* signed_offsets = values.of<int32_t>(offsets);
  DiagonalInputs inputs{view(q), view(k), view(v), q.size(0), H, q.size(2), prefix, signed_offsets, count, (float)scale,
                        zero_fill, weights.pairs.has_value(), nullptr, nullptr, nullptr, nullptr};
  if (!weights.pairs) return inputs;
  SPARSEPRIOR_CHECK(
      weights.begin && weights.prefix && weights.self,
      "pair_weights come with pair_begin, prefix_weight and self_weight");
  check_is(*weights.pairs, {weights.pairs->numel()}, float32(), "pair_weights");
  check_is(*weights.begin, {total}, int64(), "pair_begin");
  check_is(*weights.prefix, {H}, float32(), "prefix_weight");
  check_is(*weights.self, {H}, float32(), "self_weight");
  inputs.pair_weights = values.of<float>(*weights.pairs);
  inputs.pair_begin = values.of<int64_t>(*weights.begin);
  inputs.prefix_weights = values.of<float>(*weights.prefix);
  inputs.self_weights = values.of<float>(*weights.self);
  for (int64_t i = 0; i < total; ++i) {
    const int64_t length = std::max<int64_t>(0, N - std::abs((int64_t)signed_offsets[i])), begin = inputs.pair_begin[i];
    SPARSEPRIOR_CHECK(
        begin >= 0 && begin + length <= weights.pairs->numel(), "pair_begin ", begin, " and the ", length,
        " pairs of an offset must be within pair_weights of length ", weights.pairs->numel());
  }
  return inputs;
}

// Adds up 64 tokens at a time: one long sum of floats would lose their last digits.
template <typename E>
inline void add_values(const View& v, int64_t b, int64_t h, int64_t tokens, float* sums) {
  std::vector<float> own(v.width);
  for (int64_t begin = 0; begin < tokens; begin += 64) {
    std::fill(own.begin(), own.end(), 0.0f);
    for (int64_t t = begin; t < std::min(begin + 64, tokens); ++t) {
      const E* row = v.of<E>(b, h, t);
      for (int64_t d = 0; d < v.width; ++d) own[d] += (float)row[d * v.lane];
    }
    for (int64_t d = 0; d < v.width; ++d) sums[d] += own[d];
  }
}
// Sums of all values of a head, packed rows (B, H), into zeros.
inline void sum_of_values(const Tensor& v, float* sums) {
  const int64_t H = v.size(1), T = v.size(2), row = packed_width(v.size(3));
  const View values = view(v);
  parallel_for(v.size(0) * H, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* to = sums + i * row;
      values.half ? add_values<Half>(values, i / H, i % H, T, to) : add_values<float>(values, i / H, i % H, T, to);
    }
  });
}

// ---- weights of pairs -------------------------------------------------------------------------------------------------

inline WeightInputs weight_inputs(
    const Tensor& positions, const Tensor& offsets, const Tensor& counts, const Tensor& begin, const Tensor& log_gamma,
    const Tensor& alpha, int64_t pairs, Values& values) {
  const int64_t H = counts.numel();
  SPARSEPRIOR_CHECK(
      positions.dim() == 4 && (positions.size(0) == 1 || positions.size(0) == H) && positions.size(1) > 0 &&
          positions.size(2) > 0,
      "positions of shape ", positions.sizes(), " must be (1 or heads, curves, axes, patches)");
  const int64_t C = positions.size(1), A = positions.size(2), N = positions.size(3);
  check_is(positions, {positions.size(0), C, A, N}, float32(), "positions");
  check_is(counts, {H}, int32(), "counts");
  check_is(offsets, {offsets.numel()}, int32(), "offsets");
  check_is(begin, {offsets.numel()}, int64(), "pair_begin");
  check_is(log_gamma, {C, H}, float32(), "log_gamma");
  check_is(alpha, {H}, float32(), "alpha");
  const WeightInputs x{H, N, C, A, values.of<float>(positions), values.of<float>(log_gamma), values.of<float>(alpha),
                       values.of<int32_t>(offsets), values.of<int32_t>(counts), values.of<int64_t>(begin),
                       positions.size(0) > 1};
  int64_t total = 0;
  for (int64_t h = 0; h < H; ++h) {
    SPARSEPRIOR_CHECK(x.counts[h] >= 0, "counts must be 0 or more, got ", x.counts[h]);
    total += x.counts[h];
  }
  SPARSEPRIOR_CHECK(total == offsets.numel(), "counts of ", total, " offsets must be of the ", offsets.numel(), " there are");
  for (int64_t i = 0; i < total; ++i) {
    const int64_t length = std::max<int64_t>(0, N - std::abs((int64_t)x.offsets[i]));
    SPARSEPRIOR_CHECK(
        x.begin[i] >= 0 && x.begin[i] + length <= pairs, "pair_begin ", x.begin[i], " and the ", length,
        " pairs of an offset must be within ", pairs, " pairs");
  }
  return x;
}

inline ListedWeightInputs listed_weight_inputs(
    const Tensor& positions, const Tensor& keys, int64_t prefix, const Tensor& log_gamma, const Tensor& alpha,
    const Tensor& prefix_gamma, Values& values) {
  SPARSEPRIOR_CHECK(
      positions.dim() == 3 && positions.size(0) > 0 && positions.size(1) > 0 && positions.dtype() == float32(),
      "positions of shape ", positions.sizes(), " must be float32 (curves, axes, patches)");
  const int64_t C = positions.size(0), A = positions.size(1), N = positions.size(2);
  SPARSEPRIOR_CHECK(
      keys.dim() == 4 && keys.size(2) == N && keys.dtype() == int32(), "keys of shape ", keys.sizes(), " and dtype ",
      keys.dtype(), " must be int32 (images, heads, ", N, " patches, places)");
  const int64_t H = keys.size(1);
  const int32_t* own_keys = values.of<int32_t>(keys);
  if (keys.numel()) {  // a wrong number would be read as an address
    const auto [low, high] = range(own_keys, keys.numel());
    SPARSEPRIOR_CHECK(
        low >= -1 && high < prefix + N, "keys from ", low, " to ", high, " must be tokens, 0 to ", prefix + N - 1,
        ", or -1");
  }
  check_is(log_gamma, {C, H}, float32(), "log_gamma");
  check_is(alpha, {H}, float32(), "alpha");
  check_is(prefix_gamma, {H}, float32(), "prefix_gamma");
  return {keys.size(0), H, N, prefix, keys.size(3), C, A, values.of<float>(positions), own_keys,
          values.of<float>(log_gamma), values.of<float>(alpha), values.of<float>(prefix_gamma)};
}

// ---- dense with a decay ---------------------------------------------------------------------------------------------

inline DecayedInputs decayed_inputs(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions, const Tensor& log_gamma,
    const Tensor& alpha, const Tensor& prefix_gamma, int64_t prefix, double scale, Values& values) {
  check_inputs(q, k, v, prefix);
  SPARSEPRIOR_CHECK(
      positions.dim() == 3 && positions.size(0) > 0 && positions.size(1) > 0, "positions of shape ", positions.sizes(),
      " must be (curves, axes, patches)");
  const int64_t H = q.size(1), T = q.size(2), C = positions.size(0), A = positions.size(1);
  check_is(positions, {C, A, T - prefix}, float32(), "positions");
  check_is(log_gamma, {C, H}, float32(), "log_gamma");
  check_is(alpha, {H}, float32(), "alpha");
  check_is(prefix_gamma, {H}, float32(), "prefix_gamma");
  return {view(q), view(k), view(v), q.size(0), H, T, prefix, C, A, values.of<float>(positions),
          values.of<float>(log_gamma), values.of<float>(alpha), values.of<float>(prefix_gamma), (float)scale};
}

// ---- over lists of keys ---------------------------------------------------------------------------------------------

inline ListedInputs listed_inputs(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const optional<Tensor>& factor,
    const optional<Tensor>& prefix_factor, int64_t prefix, double scale, Values& values) {
  check_inputs(q, k, v, prefix);
  const int64_t B = q.size(0), H = q.size(1), T = q.size(2);
  SPARSEPRIOR_CHECK(
      keys.dim() == 4 && (keys.size(0) == 1 || keys.size(0) == B) && keys.size(1) == H && keys.size(2) == T - prefix &&
          keys.size(3) > 0 && keys.dtype() == int32(),
      "keys of shape ", keys.sizes(), " and dtype ", keys.dtype(), " must be int32 (1 or batch, heads, patches, places)");
  const int32_t* own_keys = values.of<int32_t>(keys);
  if (!listed_keys_fit(own_keys, keys.numel() / keys.size(3), keys.size(3), T)) {  // they would be read as addresses
    const auto [low, high] = range(own_keys, keys.numel());
    SPARSEPRIOR_CHECK(
        low >= -1 && high < T, "keys from ", low, " to ", high, " must be tokens, 0 to ", T - 1, ", or -1");
    fail("a list of keys is empty");
  }
  if (factor) {
    SPARSEPRIOR_CHECK(
        factor->dim() == 4 && (factor->size(0) == 1 || factor->size(0) == B) &&
            std::ranges::equal(factor->sizes().subspan(1), keys.sizes().subspan(1)) && factor->dtype() == float32(),
        "factor of shape ", factor->sizes(), " and dtype ", factor->dtype(),
        " must be float32 (1 or batch, heads, patches, places)");
  }
  if (prefix_factor) check_is(*prefix_factor, {H}, float32(), "prefix_factor");
  return {view(q), view(k), view(v), B, H, T, prefix, keys.size(3), own_keys, values.of(factor),
          values.of(prefix_factor), keys.size(0) > 1, factor && factor->size(0) > 1, (float)scale};
}

// ---- predicted keys -------------------------------------------------------------------------------------------------

inline CoefficientInputs coefficient_inputs(
    const Tensor& q, const Tensor& k, const Tensor& down, int64_t prefix, double scale, Values& values) {
  check_inputs(q, k, k, prefix);
  SPARSEPRIOR_CHECK(
      down.dim() == 2 && down.dtype() == float32() && down.size(0) > 0 && down.size(1) == q.size(2) - prefix,
      "down of shape ", down.sizes(), " and dtype ", down.dtype(), " must be float32 (rows, patches), of ",
      q.size(2) - prefix, " patches");
  return {view(q), view(k), q.size(0), q.size(1), q.size(2), prefix, down.size(0), values.of<float>(down), (float)scale,
          nullptr};
}

inline void check_predicted(const Tensor& coefficients, const Tensor& basis, int64_t prefix, int64_t budget) {
  SPARSEPRIOR_CHECK(
      coefficients.dim() == 4 && coefficients.dtype() == float32() && basis.dim() == 2 &&
          basis.dtype() == float32() && basis.size(0) == coefficients.size(3) &&
          basis.size(1) == coefficients.size(2),
      "coefficients of shape ", coefficients.sizes(), " and basis of shape ", basis.sizes(),
      " must be float32 (batch, heads, patches, rows) and (rows, patches)");
  const int64_t N = basis.size(1);
  SPARSEPRIOR_CHECK(
      prefix >= 0 && budget >= 1 && budget <= N && prefix + N < std::numeric_limits<int32_t>::max(),
      "prefix=", prefix, " must be 0 or more, budget=", budget, " 1 to the ", N, " patches");
}
// After `check_predicted`: int32 (B, H, N, prefix + budget).
inline void write_predicted_keys(
    const Tensor& coefficients, const Tensor& basis, int64_t prefix, int64_t budget, double threshold, int32_t* keys) {
  const int64_t N = basis.size(1), R = basis.size(0), row = packed_width(N);
  Values values;
  const float *own = values.of<float>(coefficients), *rows = values.of<float>(basis);
  std::vector<float> padded(R * row, 0.0f);
  for (int64_t r = 0; r < R; ++r) std::memcpy(padded.data() + r * row, rows + r * N, N * sizeof(float));
  predicted_keys(
      own, padded.data(), coefficients.numel() / std::max<int64_t>(R, 1), N, R, prefix, budget, (float)threshold, keys);
}

}  // namespace sparseprior

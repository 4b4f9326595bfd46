// The kernels as operators of torch: shapes are checked, memory is made, and torch's threads do the work. Everything of
// torch is in this file and in torch_abi.h.

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <string>

#include "kernels.h"
#include "torch_abi.h"

// tests/hub_layout.py builds these operators under another name, which can be in the same process.
#ifndef SPARSEPRIOR_NAMESPACE
#define SPARSEPRIOR_NAMESPACE "hf_sparseprior"
#endif

namespace sparseprior {

void run_parallel(
    int64_t count, int64_t grain, void (*work)(const void* context, int64_t begin, int64_t end), const void* context) {
  struct Call {
    void (*work)(const void*, int64_t, int64_t);
    const void* context;
  } call{work, context};
  const auto run = [](int64_t begin, int64_t end, void* own) {
    const Call& call = *(const Call*)own;
    call.work(call.context, begin, end);
  };
  succeed(torch_parallel_for(0, count, grain, run, &call));
}
int64_t parallel_threads() {
  uint32_t threads;
  succeed(torch_get_num_threads(&threads));
  return threads;
}

namespace {

using std::optional;

// ---- tensors --------------------------------------------------------------------------------------------------------

View view(const Tensor& x) {
  return {(char*)x.data(), x.stride(0), x.stride(1), x.stride(2), x.stride(3), x.size(3), x.dtype() == bfloat16()};
}

// The values of a tensor of any strides, in order.
template <typename T>
void copy_values(const Tensor& x, T* to) {
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

bool is(const Tensor& x, Sizes sizes, Dtype dtype) {
  return std::ranges::equal(x.sizes(), sizes) && x.dtype() == dtype;
}
void check_is(const Tensor& x, Sizes expected, Dtype dtype, const char* name) {
  SPARSEPRIOR_CHECK(
      is(x, expected, dtype), name, " of shape ", x.sizes(), " and dtype ", x.dtype(), " must be ", expected, " and ",
      dtype);
}
void check_is(const Tensor& x, List sizes, Dtype dtype, const char* name) {
  check_is(x, Sizes(sizes.begin(), sizes.size()), dtype, name);
}
void check_like(const Tensor& q, const Tensor& other, const char* name) {
  SPARSEPRIOR_CHECK(
      is(other, q.sizes(), q.dtype()), name, " of shape ", other.sizes(), " and dtype ", other.dtype(),
      " must be as q, ", q.sizes(), " and ", q.dtype());
}
void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, int64_t prefix) {
  SPARSEPRIOR_CHECK(q.dim() == 4, "q of shape ", q.sizes(), " must be (batch, heads, tokens, head width)");
  SPARSEPRIOR_CHECK(
      q.dtype() == float32() || q.dtype() == bfloat16(), "q of dtype ", q.dtype(), " must be float32 or bfloat16");
  check_like(q, k, "k");
  check_like(q, v, "v");
  SPARSEPRIOR_CHECK(
      prefix >= 0 && prefix < q.size(2), prefix, " prefix tokens must be fewer than the tokens, ", q.size(2));
}

// The lowest and highest of some numbers.
std::pair<int32_t, int32_t> range(const int32_t* numbers, int64_t count) {
  const auto [low, high] = std::minmax_element(numbers, numbers + count);
  return {*low, *high};
}

// An empty tensor (B, H, T, D) like q, in memory (B, T, H, D), as projections need it. The first touch of each page of
// new memory costs more than all work on it here, so large tensors ask for large pages.
Tensor like_projection(const Tensor& q) {
  const int64_t H = q.size(1), T = q.size(2), D = q.size(3);
  const int64_t strides[] = {T * H * D, D, H * D, 1};
  Tensor x = empty(q.sizes(), strides, q.dtype());
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t PAGE = 2 << 20;
  const uintptr_t length = q.numel() * bytes(q.dtype());
  const uintptr_t start = (uintptr_t)x.data(), begin = (start + PAGE - 1) / PAGE * PAGE;
  const uintptr_t end = (start + length) / PAGE * PAGE;
  if (end >= begin + 2 * PAGE) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
  return x;
}

Tensor floats(List sizes) { return empty(sizes, float32()); }
Tensor zeros(Sizes sizes) {
  Tensor x = empty(sizes, float32());
  if (const int64_t count = x.numel(); count > 1 << 14) {
    succeed(aoti_torch_zero_(x.handle()));  // by torch's threads
  } else if (count) {
    std::memset(x.data(), 0, count * sizeof(float));
  }
  return x;
}
Tensor zeros(List sizes) { return zeros(Sizes(sizes.begin(), sizes.size())); }
template <typename... T>
std::tuple<T...> all(T&... tensors) {
  return {std::move(tensors)...};
}
float* data(const Tensor& x) { return x.handle() && x.numel() ? (float*)x.data() : nullptr; }

// ---- along diagonals ------------------------------------------------------------------------------------------------

// The optional arguments of a decay: all or none.
struct DiagonalWeights {
  const optional<Tensor>&pairs, &begin, &prefix, &self;
};

DiagonalInputs diagonal_inputs(
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

// Factors of the pairs' weights, null if nothing is dropped.
const float* factors(const Diagonal& problem, const DiagonalInputs& x, const optional<Tensor>& drop, Values& values) {
  if (drop) check_is(*drop, {problem.pairs() + x.B * x.H * x.P * x.T}, float32(), "drop");
  return values.of(drop);
}

// Adds up 64 tokens at a time: one long sum of floats would lose their last digits.
template <typename E>
void add_values(const View& v, int64_t b, int64_t h, int64_t tokens, float* sums) {
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
// Sums of all values of a head, as packed rows.
Tensor sum_of_values(const Tensor& v) {
  const int64_t H = v.size(1), T = v.size(2), row = packed_width(v.size(3));
  Tensor sums = zeros({v.size(0), H, row});
  const View values = view(v);
  parallel_for(v.size(0) * H, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* to = data(sums) + i * row;
      values.half ? add_values<Half>(values, i / H, i % H, T, to) : add_values<float>(values, i / H, i % H, T, to);
    }
  });
  return sums;
}

// What the backward pass needs of the forward pass.
struct Kept {
  Tensor probs, logits, floors, rows;
};

// Fills `kept`, if there is one.
Tensor diagonal(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets, const Tensor& counts, int64_t prefix,
    double scale, bool zero_fill, const DiagonalWeights& weights, const optional<Tensor>& drop, Kept* kept) {
  Values values;
  const DiagonalInputs x = diagonal_inputs(q, k, v, offsets, counts, prefix, scale, zero_fill, weights, values);
  const Diagonal problem(x);
  Tensor out = like_projection(q), v_sum = zero_fill ? sum_of_values(v) : Tensor();
  const Tensor partial = problem.partial() ? floats({problem.partial()}) : Tensor();
  Kept none, &own = kept ? *kept : none;
  if (kept) {
    *kept = {floats({problem.pairs()}), floats({weights.pairs ? problem.pairs() : 0}),
             floats({zero_fill ? problem.floors() : 0}), floats({x.B, x.H, prefix, x.T})};
  }
  problem.forward({x.q, x.k, x.v, view(out), factors(problem, x, drop, values), data(v_sum), data(own.probs),
                   data(own.logits), data(own.floors), data(own.rows), data(partial)});
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> diagonal_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets, const Tensor& counts, int64_t prefix,
    double scale, bool zero_fill, const optional<Tensor>& pair_weights, const optional<Tensor>& pair_begin,
    const optional<Tensor>& prefix_weight, const optional<Tensor>& self_weight, const optional<Tensor>& drop, bool keep) {
  const DiagonalWeights weights{pair_weights, pair_begin, prefix_weight, self_weight};
  if (keep) {
    Kept kept;
    Tensor out = diagonal(q, k, v, offsets, counts, prefix, scale, zero_fill, weights, drop, &kept);
    return all(out, kept.probs, kept.logits, kept.floors, kept.rows);
  }
  Tensor out = diagonal(q, k, v, offsets, counts, prefix, scale, zero_fill, weights, drop, nullptr);
  return {std::move(out), floats({0}), floats({0}), floats({0}), floats({0, q.size(1), prefix, q.size(2)})};
}

// The output alone. Four empty tensors would cost a small call as much as its work.
Tensor diagonal_output(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets, const Tensor& counts, int64_t prefix,
    double scale, bool zero_fill, const optional<Tensor>& pair_weights, const optional<Tensor>& pair_begin,
    const optional<Tensor>& prefix_weight, const optional<Tensor>& self_weight, const optional<Tensor>& drop) {
  const DiagonalWeights weights{pair_weights, pair_begin, prefix_weight, self_weight};
  return diagonal(q, k, v, offsets, counts, prefix, scale, zero_fill, weights, drop, nullptr);
}

// Gradients of q, k, v and, with a decay, of pair_weights, prefix_weight and self_weight (otherwise empty).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> diagonal_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& offsets,
    const Tensor& counts, int64_t prefix, double scale, bool zero_fill, const optional<Tensor>& pair_weights,
    const optional<Tensor>& pair_begin, const optional<Tensor>& prefix_weight, const optional<Tensor>& self_weight,
    const optional<Tensor>& drop, const Tensor& probs, const Tensor& logits, const Tensor& floors, const Tensor& rows) {
  Values values;
  const DiagonalWeights weights{pair_weights, pair_begin, prefix_weight, self_weight};
  const DiagonalInputs x = diagonal_inputs(q, k, v, offsets, counts, prefix, scale, zero_fill, weights, values);
  check_like(q, grad, "grad");
  check_like(q, out, "out");
  const Diagonal problem(x);
  const int64_t pairs = problem.pairs(), weighed = pair_weights ? pairs : 0;
  check_is(probs, {pairs}, float32(), "probs");
  check_is(logits, {weighed}, float32(), "logits");
  check_is(floors, {zero_fill ? problem.floors() : 0}, float32(), "floors");
  check_is(rows, {x.B, x.H, prefix, x.T}, float32(), "rows");
  Tensor dq = like_projection(q), dk = like_projection(q), dv = like_projection(q);
  const Tensor pair_grads = floats({pairs}), weight_grads = floats({weighed});
  const Tensor row_grads = floats({x.B, x.H, prefix, x.T}), sums = floats({problem.sums()});
  const Tensor v_sum = zero_fill ? sum_of_values(v) : floats({0});
  Tensor d_pairs = zeros({pair_weights ? pair_weights->numel() : 0});
  Tensor d_prefix = zeros({pair_weights ? x.H : 0}), d_self = zeros({pair_weights ? x.H : 0});
  problem.backward({x.q, x.k, x.v, view(out), view(grad), view(dq), view(dk), view(dv),
                    factors(problem, x, drop, values), data(v_sum), values.of<float>(probs), values.of<float>(logits),
                    values.of<float>(floors), values.of<float>(rows), data(pair_grads), data(weight_grads),
                    data(row_grads), data(sums), data(d_pairs), data(d_prefix), data(d_self)});
  return all(dq, dk, dv, d_pairs, d_prefix, d_self);
}

// ---- weights of pairs -------------------------------------------------------------------------------------------------

WeightInputs weight_inputs(
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

Tensor pair_weights(
    const Tensor& positions, const Tensor& offsets, const Tensor& counts, const Tensor& begin, const Tensor& log_gamma,
    const Tensor& alpha, int64_t pairs) {
  Values values;
  const WeightInputs x = weight_inputs(positions, offsets, counts, begin, log_gamma, alpha, pairs, values);
  Tensor out = zeros({pairs});
  sparseprior::pair_weights(x, data(out));
  return out;
}

// Gradients of log_gamma and alpha.
std::tuple<Tensor, Tensor> pair_weights_backward(
    const Tensor& grad, const Tensor& positions, const Tensor& offsets, const Tensor& counts, const Tensor& begin,
    const Tensor& log_gamma, const Tensor& alpha) {
  Values values;
  check_is(grad, {grad.numel()}, float32(), "grad");
  const WeightInputs x = weight_inputs(positions, offsets, counts, begin, log_gamma, alpha, grad.numel(), values);
  Tensor d_log_gamma = floats({x.C, x.H}), d_alpha = floats({x.H});
  sparseprior::pair_weights_backward(x, values.of<float>(grad), data(d_log_gamma), data(d_alpha));
  return all(d_log_gamma, d_alpha);
}

ListedWeightInputs listed_weight_inputs(
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

Tensor listed_weights(
    const Tensor& positions, const Tensor& keys, int64_t prefix, const Tensor& log_gamma, const Tensor& alpha,
    const Tensor& prefix_gamma) {
  Values values;
  const ListedWeightInputs x = listed_weight_inputs(positions, keys, prefix, log_gamma, alpha, prefix_gamma, values);
  Tensor out = empty(keys.sizes(), float32());
  sparseprior::listed_weights(x, data(out));
  return out;
}

// Gradients of log_gamma, alpha and prefix_gamma.
std::tuple<Tensor, Tensor, Tensor> listed_weights_backward(
    const Tensor& grad, const Tensor& positions, const Tensor& keys, int64_t prefix, const Tensor& log_gamma,
    const Tensor& alpha, const Tensor& prefix_gamma) {
  Values values;
  check_is(grad, keys.sizes(), float32(), "grad");
  const ListedWeightInputs x = listed_weight_inputs(positions, keys, prefix, log_gamma, alpha, prefix_gamma, values);
  Tensor d_log_gamma = floats({x.C, x.H}), d_alpha = floats({x.H}), d_prefix = floats({x.H});
  sparseprior::listed_weights_backward(x, values.of<float>(grad), data(d_log_gamma), data(d_alpha), data(d_prefix));
  return all(d_log_gamma, d_alpha, d_prefix);
}

// ---- dense with a decay ---------------------------------------------------------------------------------------------

DecayedInputs decayed_inputs(
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

Tensor decayed_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions, const Tensor& log_gamma,
    const Tensor& alpha, const Tensor& prefix_gamma, int64_t prefix, double scale) {
  Values values;
  const DecayedInputs x = decayed_inputs(q, k, v, positions, log_gamma, alpha, prefix_gamma, prefix, scale, values);
  Tensor out = like_projection(q);
  sparseprior::decayed_forward(x, view(out));
  return out;
}

// Gradients of q, k, v, log_gamma, alpha and prefix_gamma.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> decayed_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions,
    const Tensor& log_gamma, const Tensor& alpha, const Tensor& prefix_gamma, int64_t prefix, double scale) {
  Values values;
  const DecayedInputs x = decayed_inputs(q, k, v, positions, log_gamma, alpha, prefix_gamma, prefix, scale, values);
  check_like(q, grad, "grad");
  Tensor dq = like_projection(q), dk = like_projection(q), dv = like_projection(q);
  const Tensor sums = floats({x.H, decayed_pieces(x), 2 + x.C}), partial = floats({decayed_partial(x)});
  sparseprior::decayed_backward(x, {view(grad), view(dq), view(dk), view(dv), data(sums), data(partial)});
  Tensor d_log_gamma = floats({x.C, x.H}), d_alpha = floats({x.H}), d_prefix = floats({x.H});
  const int64_t pieces = decayed_pieces(x), width = 2 + x.C;
  for (int64_t h = 0; h < x.H; ++h) {
    for (int64_t i = 0; i < width; ++i) {
      double total = 0;
      for (int64_t piece = 0; piece < pieces; ++piece) total += data(sums)[(h * pieces + piece) * width + i];
      (i == 0 ? data(d_alpha)[h] : i == 1 ? data(d_prefix)[h] : data(d_log_gamma)[(i - 2) * x.H + h]) = (float)total;
    }
  }
  return all(dq, dk, dv, d_log_gamma, d_alpha, d_prefix);
}

// ---- over lists of keys ---------------------------------------------------------------------------------------------

ListedInputs listed_inputs(
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

Tensor listed_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const optional<Tensor>& factor,
    const optional<Tensor>& prefix_factor, int64_t prefix, double scale) {
  Values values;
  const ListedInputs x = listed_inputs(q, k, v, keys, factor, prefix_factor, prefix, scale, values);
  Tensor out = like_projection(q);
  sparseprior::listed_forward(x, view(out));
  return out;
}

// Gradients of q, k, v, factor and prefix_factor; the last two are empty if there is no factor.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> listed_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys,
    const optional<Tensor>& factor, const optional<Tensor>& prefix_factor, int64_t prefix, double scale) {
  Values values;
  const ListedInputs x = listed_inputs(q, k, v, keys, factor, prefix_factor, prefix, scale, values);
  check_like(q, grad, "grad");
  Tensor dq = like_projection(q), dk = like_projection(q), dv = like_projection(q);
  Tensor d_factor = factor ? zeros(factor->sizes()) : floats({0});
  const Tensor prefix_parts = zeros({x.B, x.H});
  sparseprior::listed_backward(
      x, {view(grad), view(dq), view(dk), view(dv), factor ? (float*)d_factor.data() : nullptr,
          prefix_factor ? (float*)prefix_parts.data() : nullptr});
  Tensor d_prefix = floats({prefix_factor ? x.H : 0});
  for (int64_t h = 0; h < d_prefix.numel(); ++h) {
    double total = 0;
    for (int64_t b = 0; b < x.B; ++b) total += data(prefix_parts)[b * x.H + h];
    data(d_prefix)[h] = (float)total;
  }
  return all(dq, dk, dv, d_factor, d_prefix);
}

// ---- predicted keys -------------------------------------------------------------------------------------------------

Tensor predicted_coefficients(const Tensor& q, const Tensor& k, const Tensor& down, int64_t prefix, double scale) {
  check_inputs(q, k, k, prefix);
  SPARSEPRIOR_CHECK(
      down.dim() == 2 && down.dtype() == float32() && down.size(0) > 0 && down.size(1) == q.size(2) - prefix,
      "down of shape ", down.sizes(), " and dtype ", down.dtype(), " must be float32 (rows, patches), of ",
      q.size(2) - prefix, " patches");
  Values values;
  Tensor out = floats({q.size(0), q.size(1), q.size(2) - prefix, down.size(0)});
  sparseprior::predicted_coefficients(
      {view(q), view(k), q.size(0), q.size(1), q.size(2), prefix, down.size(0), values.of<float>(down), (float)scale,
       data(out)});
  return out;
}

Tensor predicted_keys(
    const Tensor& coefficients, const Tensor& basis, int64_t prefix, int64_t budget, double threshold) {
  SPARSEPRIOR_CHECK(
      coefficients.dim() == 4 && coefficients.dtype() == float32() && basis.dim() == 2 &&
          basis.dtype() == float32() && basis.size(0) == coefficients.size(3) &&
          basis.size(1) == coefficients.size(2),
      "coefficients of shape ", coefficients.sizes(), " and basis of shape ", basis.sizes(),
      " must be float32 (batch, heads, patches, rows) and (rows, patches)");
  const int64_t N = basis.size(1), R = basis.size(0);
  SPARSEPRIOR_CHECK(
      prefix >= 0 && budget >= 1 && budget <= N && prefix + N < std::numeric_limits<int32_t>::max(),
      "prefix=", prefix, " must be 0 or more, budget=", budget, " 1 to the ", N, " patches");
  Values values;
  const float *own = values.of<float>(coefficients), *rows = values.of<float>(basis);
  const Tensor padded = zeros({R, packed_width(N)});
  for (int64_t r = 0; r < R; ++r) std::memcpy(data(padded) + r * packed_width(N), rows + r * N, N * sizeof(float));
  Tensor keys = empty({coefficients.size(0), coefficients.size(1), N, prefix + budget}, int32());
  sparseprior::predicted_keys(
      own, data(padded), coefficients.numel() / std::max<int64_t>(R, 1), N, R, prefix, budget, (float)threshold,
      (int32_t*)keys.data());
  return keys;
}

// ---- operators ------------------------------------------------------------------------------------------------------

// A library's operators are there when it is loaded.
const bool ADDED = [] {
  Operators operators(SPARSEPRIOR_NAMESPACE);
  operators.add<diagonal_forward>(
      "diagonal_forward(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor counts, int prefix, float scale, "
      "bool zero_fill, Tensor? pair_weights, Tensor? pair_begin, Tensor? prefix_weight, Tensor? self_weight, "
      "Tensor? drop, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  operators.add<diagonal_output>(
      "diagonal_output(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor counts, int prefix, float scale, "
      "bool zero_fill, Tensor? pair_weights, Tensor? pair_begin, Tensor? prefix_weight, Tensor? self_weight, "
      "Tensor? drop) -> Tensor");
  operators.add<diagonal_backward>(
      "diagonal_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor offsets, Tensor counts, "
      "int prefix, float scale, bool zero_fill, Tensor? pair_weights, Tensor? pair_begin, Tensor? prefix_weight, "
      "Tensor? self_weight, Tensor? drop, Tensor probs, Tensor logits, Tensor floors, Tensor rows) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  operators.add<pair_weights>(
      "pair_weights(Tensor positions, Tensor offsets, Tensor counts, Tensor pair_begin, Tensor log_gamma, Tensor alpha, "
      "int pairs) -> Tensor");
  operators.add<pair_weights_backward>(
      "pair_weights_backward(Tensor grad, Tensor positions, Tensor offsets, Tensor counts, Tensor pair_begin, "
      "Tensor log_gamma, Tensor alpha) -> (Tensor, Tensor)");
  operators.add<listed_weights>(
      "listed_weights(Tensor positions, Tensor keys, int prefix, Tensor log_gamma, Tensor alpha, Tensor prefix_gamma) "
      "-> Tensor");
  operators.add<listed_weights_backward>(
      "listed_weights_backward(Tensor grad, Tensor positions, Tensor keys, int prefix, Tensor log_gamma, Tensor alpha, "
      "Tensor prefix_gamma) -> (Tensor, Tensor, Tensor)");
  operators.add<decayed_forward>(
      "decayed_forward(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor log_gamma, Tensor alpha, "
      "Tensor prefix_gamma, int prefix, float scale) -> Tensor");
  operators.add<decayed_backward>(
      "decayed_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor positions, Tensor log_gamma, Tensor alpha, "
      "Tensor prefix_gamma, int prefix, float scale) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  operators.add<listed_forward>(
      "listed_forward(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor? factor, Tensor? prefix_factor, int prefix, "
      "float scale) -> Tensor");
  operators.add<listed_backward>(
      "listed_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor keys, Tensor? factor, "
      "Tensor? prefix_factor, int prefix, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  operators.add<predicted_coefficients>(
      "predicted_coefficients(Tensor q, Tensor k, Tensor down, int prefix, float scale) -> Tensor");
  operators.add<predicted_keys>(
      "predicted_keys(Tensor coefficients, Tensor basis, int prefix, int budget, float threshold) -> Tensor");
  return true;
}();

}  // namespace
}  // namespace sparseprior

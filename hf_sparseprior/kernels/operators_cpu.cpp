// The kernels as operators of torch: shapes are checked, memory is made, and torch's threads do the work. Everything of
// torch is in this file.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace sparseprior {

void run_parallel(
    int64_t count, int64_t grain, void (*work)(const void* context, int64_t begin, int64_t end), const void* context) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { work(context, begin, end); });
}
int64_t parallel_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

namespace {

using at::Tensor;
using std::optional;

// ---- tensors --------------------------------------------------------------------------------------------------------

View view(const Tensor& x) {
  return {(char*)x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), x.stride(3), x.size(3),
          x.scalar_type() == at::kBFloat16};
}

// Values of small tensors of any strides, which live as long as this object.
class Values {
 public:
  template <typename T>
  const T* of(const Tensor& x) {
    kept_.push_back(x.contiguous());
    return kept_.back().const_data_ptr<T>();
  }
  const float* of(const optional<Tensor>& x) { return x ? of<float>(*x) : nullptr; }

 private:
  std::vector<Tensor> kept_;
};

void check_is(const Tensor& x, at::IntArrayRef sizes, at::ScalarType dtype, const char* name) {
  TORCH_CHECK(
      x.sizes() == sizes && x.scalar_type() == dtype, name, " of shape ", x.sizes(), " and dtype ", x.scalar_type(),
      " must be ", sizes, " and ", dtype);
}
void check_like(const Tensor& q, const Tensor& other, const char* name) {
  TORCH_CHECK(
      other.sizes() == q.sizes() && other.scalar_type() == q.scalar_type(), name, " of shape ", other.sizes(),
      " and dtype ", other.scalar_type(), " must be as q, ", q.sizes(), " and ", q.scalar_type());
}
void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, int64_t prefix) {
  TORCH_CHECK(q.dim() == 4, "q of shape ", q.sizes(), " must be (batch, heads, tokens, head width)");
  TORCH_CHECK(
      q.scalar_type() == at::kFloat || q.scalar_type() == at::kBFloat16, "q of dtype ", q.scalar_type(),
      " must be float32 or bfloat16");
  check_like(q, k, "k");
  check_like(q, v, "v");
  TORCH_CHECK(prefix >= 0 && prefix < q.size(2), prefix, " prefix tokens must be fewer than the tokens, ", q.size(2));
}

// An empty tensor (B, H, T, D) like q, in memory (B, T, H, D), as projections need it. The first touch of each page of
// new memory costs more than all work on it here, so large tensors ask for large pages.
Tensor like_projection(const Tensor& q) {
  const Tensor x = q.new_empty({q.size(0), q.size(2), q.size(1), q.size(3)});
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t PAGE = 2 << 20;
  const uintptr_t start = (uintptr_t)x.data_ptr(), begin = (start + PAGE - 1) / PAGE * PAGE;
  const uintptr_t end = (start + x.nbytes()) / PAGE * PAGE;
  if (end >= begin + 2 * PAGE) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
  return x.transpose(1, 2);
}

Tensor floats(const Tensor& like, at::IntArrayRef sizes) { return like.new_empty(sizes, like.options().dtype(at::kFloat)); }
Tensor zeros(const Tensor& like, at::IntArrayRef sizes) { return like.new_zeros(sizes, like.options().dtype(at::kFloat)); }
float* data(const Tensor& x) { return x.defined() && x.numel() ? x.data_ptr<float>() : nullptr; }

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
  check_is(counts, {H}, at::kInt, "counts");
  const int32_t* count = values.of<int32_t>(counts);
  int64_t total = 0;
  for (int64_t h = 0; h < H; ++h) {
    TORCH_CHECK(count[h] >= 0, "counts must be 0 or more, got ", count[h]);
    total += count[h];
  }
  check_is(offsets, {total}, at::kInt, "offsets");
  const int32_t* signed_offsets = values.of<int32_t>(offsets);
  DiagonalInputs inputs{view(q), view(k), view(v), q.size(0), H, q.size(2), prefix, signed_offsets, count, (float)scale,
                        zero_fill, weights.pairs.has_value(), nullptr, nullptr, nullptr, nullptr};
  if (!weights.pairs) return inputs;
  TORCH_CHECK(
      weights.begin && weights.prefix && weights.self,
      "pair_weights come with pair_begin, prefix_weight and self_weight");
  check_is(*weights.pairs, {weights.pairs->numel()}, at::kFloat, "pair_weights");
  check_is(*weights.begin, {total}, at::kLong, "pair_begin");
  check_is(*weights.prefix, {H}, at::kFloat, "prefix_weight");
  check_is(*weights.self, {H}, at::kFloat, "self_weight");
  inputs.pair_weights = values.of<float>(*weights.pairs);
  inputs.pair_begin = values.of<int64_t>(*weights.begin);
  inputs.prefix_weights = values.of<float>(*weights.prefix);
  inputs.self_weights = values.of<float>(*weights.self);
  for (int64_t i = 0; i < total; ++i) {
    const int64_t length = std::max<int64_t>(0, N - std::abs((int64_t)signed_offsets[i])), begin = inputs.pair_begin[i];
    TORCH_CHECK(
        begin >= 0 && begin + length <= weights.pairs->numel(), "pair_begin ", begin, " and the ", length,
        " pairs of an offset must be within pair_weights of length ", weights.pairs->numel());
  }
  return inputs;
}

// Factors of the pairs' weights, null if nothing is dropped.
const float* factors(const Diagonal& problem, const DiagonalInputs& x, const optional<Tensor>& drop, Values& values) {
  if (drop) check_is(*drop, {problem.pairs() + x.B * x.H * x.P * x.T}, at::kFloat, "drop");
  return values.of(drop);
}

// Sums of all values of a head, as packed rows.
Tensor sum_of_values(const Tensor& v) {
  const Tensor sums = zeros(v, {v.size(0), v.size(1), packed_width(v.size(3))});
  sums.narrow(2, 0, v.size(3)).copy_(v.sum(2, false, at::kFloat));
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
  const Tensor out = like_projection(q), v_sum = zero_fill ? sum_of_values(v) : Tensor();
  const Tensor partial = problem.partial() ? floats(q, {problem.partial()}) : Tensor();
  const Kept none, &own = kept ? *kept : none;
  if (kept) {
    *kept = {floats(q, {problem.pairs()}), floats(q, {weights.pairs ? problem.pairs() : 0}),
             floats(q, {zero_fill ? problem.floors() : 0}), floats(q, {x.B, x.H, prefix, x.T})};
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
    const Tensor out = diagonal(q, k, v, offsets, counts, prefix, scale, zero_fill, weights, drop, &kept);
    return {out, kept.probs, kept.logits, kept.floors, kept.rows};
  }
  const Tensor out = diagonal(q, k, v, offsets, counts, prefix, scale, zero_fill, weights, drop, nullptr);
  return {out, floats(q, {0}), floats(q, {0}), floats(q, {0}), floats(q, {0, q.size(1), prefix, q.size(2)})};
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
  check_is(probs, {pairs}, at::kFloat, "probs");
  check_is(logits, {weighed}, at::kFloat, "logits");
  check_is(floors, {zero_fill ? problem.floors() : 0}, at::kFloat, "floors");
  check_is(rows, {x.B, x.H, prefix, x.T}, at::kFloat, "rows");
  const Tensor dq = like_projection(q), dk = like_projection(q), dv = like_projection(q);
  const Tensor pair_grads = floats(q, {pairs}), weight_grads = floats(q, {weighed});
  const Tensor row_grads = floats(q, {x.B, x.H, prefix, x.T}), sums = floats(q, {problem.sums()});
  const Tensor v_sum = zero_fill ? sum_of_values(v) : floats(q, {0});
  const Tensor d_pairs = zeros(q, {pair_weights ? pair_weights->numel() : 0});
  const Tensor d_prefix = zeros(q, {pair_weights ? x.H : 0}), d_self = zeros(q, {pair_weights ? x.H : 0});
  problem.backward({x.q, x.k, x.v, view(out), view(grad), view(dq), view(dk), view(dv),
                    factors(problem, x, drop, values), data(v_sum), values.of<float>(probs), values.of<float>(logits),
                    values.of<float>(floors), values.of<float>(rows), data(pair_grads), data(weight_grads),
                    data(row_grads), data(sums), data(d_pairs), data(d_prefix), data(d_self)});
  return {dq, dk, dv, d_pairs, d_prefix, d_self};
}

// ---- weights of pairs -------------------------------------------------------------------------------------------------

WeightInputs weight_inputs(
    const Tensor& positions, const Tensor& offsets, const Tensor& counts, const Tensor& begin, const Tensor& log_gamma,
    const Tensor& alpha, int64_t pairs, Values& values) {
  const int64_t H = counts.numel();
  TORCH_CHECK(
      positions.dim() == 4 && (positions.size(0) == 1 || positions.size(0) == H) && positions.size(1) > 0 &&
          positions.size(2) > 0,
      "positions of shape ", positions.sizes(), " must be (1 or heads, curves, axes, patches)");
  const int64_t C = positions.size(1), A = positions.size(2), N = positions.size(3);
  check_is(positions, {positions.size(0), C, A, N}, at::kFloat, "positions");
  check_is(counts, {H}, at::kInt, "counts");
  check_is(offsets, {offsets.numel()}, at::kInt, "offsets");
  check_is(begin, {offsets.numel()}, at::kLong, "pair_begin");
  check_is(log_gamma, {C, H}, at::kFloat, "log_gamma");
  check_is(alpha, {H}, at::kFloat, "alpha");
  const WeightInputs x{H, N, C, A, values.of<float>(positions), values.of<float>(log_gamma), values.of<float>(alpha),
                       values.of<int32_t>(offsets), values.of<int32_t>(counts), values.of<int64_t>(begin),
                       positions.size(0) > 1};
  int64_t total = 0;
  for (int64_t h = 0; h < H; ++h) {
    TORCH_CHECK(x.counts[h] >= 0, "counts must be 0 or more, got ", x.counts[h]);
    total += x.counts[h];
  }
  TORCH_CHECK(total == offsets.numel(), "counts of ", total, " offsets must be of the ", offsets.numel(), " there are");
  for (int64_t i = 0; i < total; ++i) {
    const int64_t length = std::max<int64_t>(0, N - std::abs((int64_t)x.offsets[i]));
    TORCH_CHECK(
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
  const Tensor out = zeros(alpha, {pairs});
  sparseprior::pair_weights(x, data(out));
  return out;
}

// Gradients of log_gamma and alpha.
std::tuple<Tensor, Tensor> pair_weights_backward(
    const Tensor& grad, const Tensor& positions, const Tensor& offsets, const Tensor& counts, const Tensor& begin,
    const Tensor& log_gamma, const Tensor& alpha) {
  Values values;
  check_is(grad, {grad.numel()}, at::kFloat, "grad");
  const WeightInputs x = weight_inputs(positions, offsets, counts, begin, log_gamma, alpha, grad.numel(), values);
  const Tensor d_log_gamma = floats(alpha, {x.C, x.H}), d_alpha = floats(alpha, {x.H});
  sparseprior::pair_weights_backward(x, values.of<float>(grad), data(d_log_gamma), data(d_alpha));
  return {d_log_gamma, d_alpha};
}

ListedWeightInputs listed_weight_inputs(
    const Tensor& positions, const Tensor& keys, int64_t prefix, const Tensor& log_gamma, const Tensor& alpha,
    const Tensor& prefix_gamma, Values& values) {
  TORCH_CHECK(
      positions.dim() == 3 && positions.size(0) > 0 && positions.size(1) > 0 && positions.scalar_type() == at::kFloat,
      "positions of shape ", positions.sizes(), " must be float32 (curves, axes, patches)");
  const int64_t C = positions.size(0), A = positions.size(1), N = positions.size(2);
  TORCH_CHECK(
      keys.dim() == 4 && keys.size(2) == N && keys.scalar_type() == at::kInt, "keys of shape ", keys.sizes(), " and dtype ",
      keys.scalar_type(), " must be int32 (images, heads, ", N, " patches, places)");
  const int64_t H = keys.size(1);
  if (keys.numel()) {  // a wrong number would be read as an address
    const auto [low, high] = keys.aminmax();
    TORCH_CHECK(
        low.item<int>() >= -1 && high.item<int>() < prefix + N, "keys from ", low.item<int>(), " to ", high.item<int>(),
        " must be tokens, 0 to ", prefix + N - 1, ", or -1");
  }
  check_is(log_gamma, {C, H}, at::kFloat, "log_gamma");
  check_is(alpha, {H}, at::kFloat, "alpha");
  check_is(prefix_gamma, {H}, at::kFloat, "prefix_gamma");
  return {keys.size(0), H, N, prefix, keys.size(3), C, A, values.of<float>(positions), values.of<int32_t>(keys),
          values.of<float>(log_gamma), values.of<float>(alpha), values.of<float>(prefix_gamma)};
}

Tensor listed_weights(
    const Tensor& positions, const Tensor& keys, int64_t prefix, const Tensor& log_gamma, const Tensor& alpha,
    const Tensor& prefix_gamma) {
  Values values;
  const ListedWeightInputs x = listed_weight_inputs(positions, keys, prefix, log_gamma, alpha, prefix_gamma, values);
  const Tensor out = floats(alpha, keys.sizes());
  sparseprior::listed_weights(x, data(out));
  return out;
}

// Gradients of log_gamma, alpha and prefix_gamma.
std::tuple<Tensor, Tensor, Tensor> listed_weights_backward(
    const Tensor& grad, const Tensor& positions, const Tensor& keys, int64_t prefix, const Tensor& log_gamma,
    const Tensor& alpha, const Tensor& prefix_gamma) {
  Values values;
  check_is(grad, keys.sizes(), at::kFloat, "grad");
  const ListedWeightInputs x = listed_weight_inputs(positions, keys, prefix, log_gamma, alpha, prefix_gamma, values);
  const Tensor d_log_gamma = floats(alpha, {x.C, x.H}), d_alpha = floats(alpha, {x.H}), d_prefix = floats(alpha, {x.H});
  sparseprior::listed_weights_backward(x, values.of<float>(grad), data(d_log_gamma), data(d_alpha), data(d_prefix));
  return {d_log_gamma, d_alpha, d_prefix};
}

// ---- dense with a decay ---------------------------------------------------------------------------------------------

DecayedInputs decayed_inputs(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions, const Tensor& log_gamma,
    const Tensor& alpha, const Tensor& prefix_gamma, int64_t prefix, double scale, Values& values) {
  check_inputs(q, k, v, prefix);
  TORCH_CHECK(
      positions.dim() == 3 && positions.size(0) > 0 && positions.size(1) > 0, "positions of shape ", positions.sizes(),
      " must be (curves, axes, patches)");
  const int64_t H = q.size(1), T = q.size(2), C = positions.size(0), A = positions.size(1);
  check_is(positions, {C, A, T - prefix}, at::kFloat, "positions");
  check_is(log_gamma, {C, H}, at::kFloat, "log_gamma");
  check_is(alpha, {H}, at::kFloat, "alpha");
  check_is(prefix_gamma, {H}, at::kFloat, "prefix_gamma");
  return {view(q), view(k), view(v), q.size(0), H, T, prefix, C, A, values.of<float>(positions),
          values.of<float>(log_gamma), values.of<float>(alpha), values.of<float>(prefix_gamma), (float)scale};
}

Tensor decayed_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions, const Tensor& log_gamma,
    const Tensor& alpha, const Tensor& prefix_gamma, int64_t prefix, double scale) {
  Values values;
  const DecayedInputs x = decayed_inputs(q, k, v, positions, log_gamma, alpha, prefix_gamma, prefix, scale, values);
  const Tensor out = like_projection(q);
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
  const Tensor dq = like_projection(q), dk = like_projection(q), dv = like_projection(q);
  const Tensor sums = floats(q, {x.H, decayed_pieces(x), 2 + x.C}), partial = floats(q, {decayed_partial(x)});
  sparseprior::decayed_backward(x, {view(grad), view(dq), view(dk), view(dv), data(sums), data(partial)});
  const Tensor total = sums.sum(1);  // (H, 2 + C)
  return {dq, dk, dv, total.slice(1, 2).t().contiguous(), total.select(1, 0).contiguous(), total.select(1, 1).contiguous()};
}

// ---- over lists of keys ---------------------------------------------------------------------------------------------

ListedInputs listed_inputs(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const optional<Tensor>& factor,
    const optional<Tensor>& prefix_factor, int64_t prefix, double scale, Values& values) {
  check_inputs(q, k, v, prefix);
  const int64_t B = q.size(0), H = q.size(1), T = q.size(2);
  TORCH_CHECK(
      keys.dim() == 4 && (keys.size(0) == 1 || keys.size(0) == B) && keys.size(1) == H && keys.size(2) == T - prefix &&
          keys.size(3) > 0 && keys.scalar_type() == at::kInt,
      "keys of shape ", keys.sizes(), " and dtype ", keys.scalar_type(), " must be int32 (1 or batch, heads, patches, places)");
  const int32_t* own_keys = values.of<int32_t>(keys);
  if (!listed_keys_fit(own_keys, keys.numel() / keys.size(3), keys.size(3), T)) {  // they would be read as addresses
    const auto [low, high] = keys.aminmax();
    TORCH_CHECK(
        low.item<int>() >= -1 && high.item<int>() < T, "keys from ", low.item<int>(), " to ", high.item<int>(),
        " must be tokens, 0 to ", T - 1, ", or -1");
    TORCH_CHECK(false, "a list of keys is empty");
  }
  if (factor) {
    TORCH_CHECK(
        factor->dim() == 4 && (factor->size(0) == 1 || factor->size(0) == B) &&
            factor->sizes().slice(1) == keys.sizes().slice(1) && factor->scalar_type() == at::kFloat,
        "factor of shape ", factor->sizes(), " and dtype ", factor->scalar_type(),
        " must be float32 (1 or batch, heads, patches, places)");
  }
  if (prefix_factor) check_is(*prefix_factor, {H}, at::kFloat, "prefix_factor");
  return {view(q), view(k), view(v), B, H, T, prefix, keys.size(3), own_keys, values.of(factor),
          values.of(prefix_factor), keys.size(0) > 1, factor && factor->size(0) > 1, (float)scale};
}

Tensor listed_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const optional<Tensor>& factor,
    const optional<Tensor>& prefix_factor, int64_t prefix, double scale) {
  Values values;
  const ListedInputs x = listed_inputs(q, k, v, keys, factor, prefix_factor, prefix, scale, values);
  const Tensor out = like_projection(q);
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
  const Tensor dq = like_projection(q), dk = like_projection(q), dv = like_projection(q);
  const Tensor d_factor = factor ? zeros(q, factor->sizes()) : floats(q, {0});
  const Tensor d_prefix = zeros(q, {x.B, x.H});
  sparseprior::listed_backward(
      x, {view(grad), view(dq), view(dk), view(dv), factor ? d_factor.data_ptr<float>() : nullptr,
          prefix_factor ? d_prefix.data_ptr<float>() : nullptr});
  return {dq, dk, dv, d_factor, prefix_factor ? d_prefix.sum(0) : floats(q, {0})};
}

// ---- predicted keys -------------------------------------------------------------------------------------------------

Tensor predicted_coefficients(const Tensor& q, const Tensor& k, const Tensor& down, int64_t prefix, double scale) {
  check_inputs(q, k, k, prefix);
  TORCH_CHECK(
      down.dim() == 2 && down.scalar_type() == at::kFloat && down.size(0) > 0 && down.size(1) == q.size(2) - prefix,
      "down of shape ", down.sizes(), " and dtype ", down.scalar_type(), " must be float32 (rows, patches), of ",
      q.size(2) - prefix, " patches");
  Values values;
  const Tensor out = floats(q, {q.size(0), q.size(1), q.size(2) - prefix, down.size(0)});
  sparseprior::predicted_coefficients(
      {view(q), view(k), q.size(0), q.size(1), q.size(2), prefix, down.size(0), values.of<float>(down), (float)scale,
       data(out)});
  return out;
}

Tensor predicted_keys(
    const Tensor& coefficients, const Tensor& basis, int64_t prefix, int64_t budget, double threshold) {
  TORCH_CHECK(
      coefficients.dim() == 4 && coefficients.scalar_type() == at::kFloat && basis.dim() == 2 &&
          basis.scalar_type() == at::kFloat && basis.size(0) == coefficients.size(3) &&
          basis.size(1) == coefficients.size(2),
      "coefficients of shape ", coefficients.sizes(), " and basis of shape ", basis.sizes(),
      " must be float32 (batch, heads, patches, rows) and (rows, patches)");
  const int64_t N = basis.size(1), R = basis.size(0);
  TORCH_CHECK(
      prefix >= 0 && budget >= 1 && budget <= N && prefix + N < std::numeric_limits<int32_t>::max(),
      "prefix=", prefix, " must be 0 or more, budget=", budget, " 1 to the ", N, " patches");
  const Tensor c = coefficients.contiguous(), padded = zeros(basis, {R, packed_width(N)});
  padded.narrow(1, 0, N).copy_(basis);
  const Tensor keys = c.new_empty({c.size(0), c.size(1), N, prefix + budget}, c.options().dtype(at::kInt));
  sparseprior::predicted_keys(
      c.data_ptr<float>(), padded.data_ptr<float>(), c.numel() / std::max<int64_t>(R, 1), N, R, prefix, budget,
      (float)threshold, keys.data_ptr<int32_t>());
  return keys;
}

// ---- operators ------------------------------------------------------------------------------------------------------

TORCH_LIBRARY_FRAGMENT(hf_sparseprior, m) {
  m.def(
      "diagonal_forward(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor counts, int prefix, float scale, "
      "bool zero_fill, Tensor? pair_weights, Tensor? pair_begin, Tensor? prefix_weight, Tensor? self_weight, "
      "Tensor? drop, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "diagonal_output(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor counts, int prefix, float scale, "
      "bool zero_fill, Tensor? pair_weights, Tensor? pair_begin, Tensor? prefix_weight, Tensor? self_weight, "
      "Tensor? drop) -> Tensor");
  m.def(
      "diagonal_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor offsets, Tensor counts, "
      "int prefix, float scale, bool zero_fill, Tensor? pair_weights, Tensor? pair_begin, Tensor? prefix_weight, "
      "Tensor? self_weight, Tensor? drop, Tensor probs, Tensor logits, Tensor floors, Tensor rows) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "pair_weights(Tensor positions, Tensor offsets, Tensor counts, Tensor pair_begin, Tensor log_gamma, Tensor alpha, "
      "int pairs) -> Tensor");
  m.def(
      "pair_weights_backward(Tensor grad, Tensor positions, Tensor offsets, Tensor counts, Tensor pair_begin, "
      "Tensor log_gamma, Tensor alpha) -> (Tensor, Tensor)");
  m.def(
      "listed_weights(Tensor positions, Tensor keys, int prefix, Tensor log_gamma, Tensor alpha, Tensor prefix_gamma) "
      "-> Tensor");
  m.def(
      "listed_weights_backward(Tensor grad, Tensor positions, Tensor keys, int prefix, Tensor log_gamma, Tensor alpha, "
      "Tensor prefix_gamma) -> (Tensor, Tensor, Tensor)");
  m.def(
      "decayed_forward(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor log_gamma, Tensor alpha, "
      "Tensor prefix_gamma, int prefix, float scale) -> Tensor");
  m.def(
      "decayed_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor positions, Tensor log_gamma, Tensor alpha, "
      "Tensor prefix_gamma, int prefix, float scale) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "listed_forward(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor? factor, Tensor? prefix_factor, int prefix, "
      "float scale) -> Tensor");
  m.def(
      "listed_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor keys, Tensor? factor, "
      "Tensor? prefix_factor, int prefix, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("predicted_coefficients(Tensor q, Tensor k, Tensor down, int prefix, float scale) -> Tensor");
  m.def("predicted_keys(Tensor coefficients, Tensor basis, int prefix, int budget, float threshold) -> Tensor");
}

TORCH_LIBRARY_IMPL(hf_sparseprior, CPU, m) {
  m.impl("diagonal_forward", diagonal_forward);
  m.impl("diagonal_output", diagonal_output);
  m.impl("diagonal_backward", diagonal_backward);
  m.impl("pair_weights", pair_weights);
  m.impl("pair_weights_backward", pair_weights_backward);
  m.impl("listed_weights", listed_weights);
  m.impl("listed_weights_backward", listed_weights_backward);
  m.impl("decayed_forward", decayed_forward);
  m.impl("decayed_backward", decayed_backward);
  m.impl("listed_forward", listed_forward);
  m.impl("listed_backward", listed_backward);
  m.impl("predicted_coefficients", predicted_coefficients);
  m.impl("predicted_keys", predicted_keys);
}

}  // namespace
}  // namespace sparseprior

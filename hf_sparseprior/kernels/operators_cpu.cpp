// The kernels as operators of torch: memory is made, and torch's threads do the work. Everything of torch is in this file and
// in torch_abi.h.

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <string>

#include "torch_abi.h"
#include "calls.h"  // after the tensors that it takes

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

// Factors of the pairs' weights, null if nothing is dropped.
const float* factors(const Diagonal& problem, const DiagonalInputs& x, const optional<Tensor>& drop, Values& values) {
  if (drop) check_is(*drop, {problem.pairs() + x.B * x.H * x.P * x.T}, float32(), "drop");
  return values.of(drop);
}

Tensor packed_sums(const Tensor& v) {
  Tensor sums = zeros({v.size(0), v.size(1), packed_width(v.size(3))});
  sum_of_values(v, data(sums));
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
  Tensor out = like_projection(q), v_sum = zero_fill ? packed_sums(v) : Tensor();
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
  const Tensor v_sum = zero_fill ? packed_sums(v) : floats({0});
  Tensor d_pairs = zeros({pair_weights ? pair_weights->numel() : 0});
  Tensor d_prefix = zeros({pair_weights ? x.H : 0}), d_self = zeros({pair_weights ? x.H : 0});
  problem.backward({x.q, x.k, x.v, view(out), view(grad), view(dq), view(dk), view(dv),
                    factors(problem, x, drop, values), data(v_sum), values.of<float>(probs), values.of<float>(logits),
                    values.of<float>(floors), values.of<float>(rows), data(pair_grads), data(weight_grads),
                    data(row_grads), data(sums), data(d_pairs), data(d_prefix), data(d_self)});
  return all(dq, dk, dv, d_pairs, d_prefix, d_self);
}

// ---- weights of pairs -------------------------------------------------------------------------------------------------

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
  Values values;
  CoefficientInputs x = coefficient_inputs(q, k, down, prefix, scale, values);
  Tensor out = floats({x.B, x.H, x.T - prefix, x.R});
  x.out = data(out);
  sparseprior::predicted_coefficients(x);
  return out;
}

Tensor predicted_keys(
    const Tensor& coefficients, const Tensor& basis, int64_t prefix, int64_t budget, double threshold) {
  check_predicted(coefficients, basis, prefix, budget);
  Tensor keys = empty({coefficients.size(0), coefficients.size(1), basis.size(1), prefix + budget}, int32());
  write_predicted_keys(coefficients, basis, prefix, budget, threshold, (int32_t*)keys.data());
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

// The kernels as operators of programs other than torch, see program_operators.h.

#include "program_operators.h"

#include "calls.h"  // after the arrays that it takes

namespace sparseprior {

namespace {

using Shape = std::vector<int64_t>;
using Shapes = std::span<const Shape>;

// int64 of int32: OpenVINO's CPU has no int64.
struct Wide {
  explicit Wide(const Tensor* x) {
    if (!x) return;
    numbers.assign((const int32_t*)x->data(), (const int32_t*)x->data() + x->numel());
    tensor = Tensor(numbers.data(), {x->sizes().begin(), x->sizes().end()}, Dtype::int64);
  }
  std::vector<int64_t> numbers;
  optional<Tensor> tensor;
};

optional<Tensor> maybe(const Tensor* x) { return x ? optional<Tensor>(*x) : std::nullopt; }

// An output (batch, tokens, heads, head width) of the shape of q.
Tensor output_like(const Tensor& q, void* out) { return Tensor(out, {q.sizes().begin(), q.sizes().end()}, q.dtype()); }

// q, k, v, offsets, counts and, with a decay, pair_weights, pair_begin, prefix_weight, self_weight
void diagonal(Inputs in, const Attributes& own, void* to) {
  const Tensor q = in[0]->heads_first(), k = in[1]->heads_first(), v = in[2]->heads_first();
  const Tensor out = output_like(*in[0], to).heads_first();
  const optional<Tensor> pairs = maybe(in[5]), prefix = maybe(in[7]), self = maybe(in[8]);
  const Wide begin(in[6]);
  Values values;
  const Diagonal problem(diagonal_inputs(
      q, k, v, *in[3], *in[4], own.prefix, own.scale, own.zero_fill, {pairs, begin.tensor, prefix, self}, values));
  std::vector<float> sums(own.zero_fill ? q.size(0) * q.size(1) * packed_width(q.size(3)) : 0);
  if (own.zero_fill) sum_of_values(v, sums.data());
  const std::unique_ptr<float[]> partial(new float[problem.partial()]);
  problem.forward({view(q), view(k), view(v), view(out), nullptr, sums.empty() ? nullptr : sums.data(), nullptr, nullptr,
                   nullptr, nullptr, partial.get()});
}

// q, k, v, positions, log_gamma, alpha, prefix_gamma
void decayed(Inputs in, const Attributes& own, void* to) {
  const Tensor q = in[0]->heads_first(), k = in[1]->heads_first(), v = in[2]->heads_first();
  Values values;
  decayed_forward(
      decayed_inputs(q, k, v, *in[3], *in[4], *in[5], *in[6], own.prefix, own.scale, values),
      view(output_like(*in[0], to).heads_first()));
}

// q, k, v, keys and, with a decay, factor, prefix_factor
void listed(Inputs in, const Attributes& own, void* to) {
  const Tensor q = in[0]->heads_first(), k = in[1]->heads_first(), v = in[2]->heads_first();
  Values values;
  listed_forward(
      listed_inputs(q, k, v, *in[3], maybe(in[4]), maybe(in[5]), own.prefix, own.scale, values),
      view(output_like(*in[0], to).heads_first()));
}

// positions, offsets, counts, pair_begin, log_gamma, alpha
void weights_of_pairs(Inputs in, const Attributes& own, void* out) {
  SPARSEPRIOR_CHECK(own.pairs >= 0, "pairs=", own.pairs, " must be 0 or more");
  Values values;
  const Wide begin(in[3]);
  const WeightInputs x = weight_inputs(*in[0], *in[1], *in[2], *begin.tensor, *in[4], *in[5], own.pairs, values);
  std::memset(out, 0, own.pairs * sizeof(float));
  pair_weights(x, (float*)out);
}

// positions, keys, log_gamma, alpha, prefix_gamma
void weights_of_keys(Inputs in, const Attributes& own, void* out) {
  Values values;
  listed_weights(listed_weight_inputs(*in[0], *in[1], own.prefix, *in[2], *in[3], *in[4], values), (float*)out);
}

// q, k, down
void coefficients(Inputs in, const Attributes& own, void* out) {
  const Tensor q = in[0]->heads_first(), k = in[1]->heads_first();
  Values values;
  CoefficientInputs x = coefficient_inputs(q, k, *in[2], own.prefix, own.scale, values);
  x.out = (float*)out;
  predicted_coefficients(x);
}
Shape coefficient_shape(Shapes inputs, const Attributes& own) {
  const Shape &q = inputs[0], &down = inputs[2];
  return {q[0], q[2], q[1] < 0 ? -1 : q[1] - own.prefix, down[0]};
}

// coefficients, basis
void keys(Inputs in, const Attributes& own, void* out) {
  check_predicted(*in[0], *in[1], own.prefix, own.budget);
  write_predicted_keys(*in[0], *in[1], own.prefix, own.budget, own.threshold, (int32_t*)out);
}
Shape key_shape(Shapes inputs, const Attributes& own) {
  const Shape& x = inputs[0];
  return {x[0], x[1], x[2], own.prefix + own.budget};
}

constexpr Dtype F = Dtype::float32, I = Dtype::int32;
constexpr ProgramOperator::Integer PREFIX{"prefix", &Attributes::prefix};
constexpr ProgramOperator::Float SCALE{"scale", &Attributes::scale};

}  // namespace

Shape shape_of_first(Shapes inputs, const Attributes&) { return inputs[0]; }

void check_ranks(const ProgramOperator& own, Shapes inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto& [name, dtype, axes, left_out] = own.inputs[i];
    const size_t given = inputs[i].size();
    SPARSEPRIOR_CHECK(given == axes || (!given && left_out), own.name, ": ", name, " of ", given, " axes must have ", axes);
  }
}

const std::vector<ProgramOperator>& program_operators() {
  static const std::vector<ProgramOperator> ALL{
      {"DiagonalAttention",
       {{"q", F, 4}, {"k", F, 4}, {"v", F, 4}, {"offsets", I, 1}, {"counts", I, 1}, {"pair_weights", F, 1, true}, {"pair_begin", I, 1, true},
        {"prefix_weight", F, 1, true}, {"self_weight", F, 1, true}},
       F, {PREFIX, {"zero_fill", &Attributes::zero_fill}}, {SCALE}, shape_of_first, diagonal},
      {"DecayedAttention",
       {{"q", F, 4}, {"k", F, 4}, {"v", F, 4}, {"positions", F, 3}, {"log_gamma", F, 2}, {"alpha", F, 1}, {"prefix_gamma", F, 1}},
       F, {PREFIX}, {SCALE}, shape_of_first, decayed},
      {"ListedAttention",
       {{"q", F, 4}, {"k", F, 4}, {"v", F, 4}, {"keys", I, 4}, {"factor", F, 4, true}, {"prefix_factor", F, 1, true}},
       F, {PREFIX}, {SCALE}, shape_of_first, listed},
      {"PairWeights",
       {{"positions", F, 4}, {"offsets", I, 1}, {"counts", I, 1}, {"pair_begin", I, 1}, {"log_gamma", F, 2}, {"alpha", F, 1}},
       F, {{"pairs", &Attributes::pairs}}, {},
       [](Shapes, const Attributes& own) { return Shape{own.pairs}; }, weights_of_pairs},
      {"ListedWeights",
       {{"positions", F, 3}, {"keys", I, 4}, {"log_gamma", F, 2}, {"alpha", F, 1}, {"prefix_gamma", F, 1}},
       F, {PREFIX}, {},
       [](Shapes inputs, const Attributes&) { return inputs[1]; }, weights_of_keys},
      {"PredictedCoefficients", {{"q", F, 4}, {"k", F, 4}, {"down", F, 2}}, F, {PREFIX}, {SCALE}, coefficient_shape, coefficients},
      {"PredictedKeys",
       {{"coefficients", F, 4}, {"basis", F, 2}},
       I, {PREFIX, {"budget", &Attributes::budget}}, {{"threshold", &Attributes::threshold}}, key_shape, keys},
  };
  return ALL;
}

}  // namespace sparseprior

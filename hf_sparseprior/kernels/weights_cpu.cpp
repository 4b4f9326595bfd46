// Weights of the pairs of attention along diagonals under a decay, on CPUs, and their gradients.
//
//   weight of (j, j + o) of head h = alpha_h * mean over curves c of gamma_ch^d,  d = |p_c(j + o) - p_c(j)|, summed over axes
//
// Distances are taken from the positions, which stay in a cache; a table of the distances of all pairs would not.
//
// Shapes: H heads, N patches, C curves, A axes of a position, S signed offsets. A pair has one weight in both directions,
// so only offsets of 0 and more are looked at.

#include <vector>

#include "vectors.h"

namespace sparseprior {
namespace {

constexpr float LOG2_E = 1.44269504f;

// The offsets, each with its head.
struct Offset {
  int64_t head, number, distance;
};
std::vector<Offset> offsets_of(const WeightInputs& x) {
  std::vector<Offset> found;
  int64_t number = 0;
  for (int64_t h = 0; h < x.H; ++h) {
    for (int32_t i = 0; i < x.counts[h]; ++i, ++number) {
      if (x.offsets[number] >= 0 && x.offsets[number] < x.N) found.push_back({h, number, x.offsets[number]});
    }
  }
  return found;
}

// Distances along curve c of 16 pairs from row j on.
template <bool ONE_AXIS>
SPARSEPRIOR_INLINE vec distances(const WeightInputs& x, const Offset& offset, int64_t c, int64_t j, int64_t count) {
  const float* p = x.positions + ((x.own_positions ? offset.head * x.C : 0) + c) * x.A * x.N + j;
  vec total = vec{};
  for (int64_t a = 0; a < (ONE_AXIS ? 1 : x.A); ++a, p += x.N) {
    const vec difference = load_lanes(p + offset.distance, 0, count) - load_lanes(p, 0, count);
    total += maximum(difference, -difference);
  }
  return total;
}

// The curves' powers of 16 pairs, one after the other.
template <bool ONE_AXIS, typename F>
SPARSEPRIOR_INLINE void powers(const WeightInputs& x, const Offset& offset, int64_t j, int64_t count, const F& use) {
  for (int64_t c = 0; c < x.C; ++c) {
    const vec d = distances<ONE_AXIS>(x, offset, c, j, count);
    use(c, d, exp2_of(d * (x.log_gamma[c * x.H + offset.head] * LOG2_E)));
  }
}

// Calls work(first pair, how many) for blocks of 16, whose number is a constant, and for the rest.
template <typename F>
SPARSEPRIOR_INLINE void for_blocks(int64_t pairs, const F& work) {
  int64_t j = 0;
  for (; j + L <= pairs; j += L) work(j, std::integral_constant<int64_t, L>());
  if (j < pairs) work(j, pairs - j);
}

template <bool ONE_AXIS>
void weigh(const WeightInputs& x, const Offset& offset, float* out) {
  const float share = x.alpha[offset.head] / (float)x.C;
  out += x.begin[offset.number];
  for_blocks(x.N - offset.distance, [&](int64_t j, auto count) {
    vec total = vec{};
    powers<ONE_AXIS>(x, offset, j, count, [&](int64_t, vec, vec power) { total += power; });
    store_lanes(out + j, total * share, count);
  });
}

// Sums of gradient * power, then for each curve of gradient * power * distance.
template <bool ONE_AXIS>
void add_gradients(const WeightInputs& x, const Offset& offset, const float* grad, float* sums) {
  const Buffer lanes_of((1 + x.C) * L);
  float* lanes = lanes_of.data();
  std::fill_n(lanes, (1 + x.C) * L, 0.0f);
  grad += x.begin[offset.number];
  for_blocks(x.N - offset.distance, [&](int64_t j, auto count) {
    const vec g = load_lanes(grad + j, 0, count);
    vec total = load(lanes);
    powers<ONE_AXIS>(x, offset, j, count, [&](int64_t c, vec d, vec power) {
      const vec own = g * power;
      total += own;
      store(lanes + L * (1 + c), load(lanes + L * (1 + c)) + own * d);
    });
    store(lanes, total);
  });
  for (int64_t i = 0; i <= x.C; ++i) sums[i] = sum(load(lanes + L * i));
}

}  // namespace

void pair_weights(const WeightInputs& x, float* out) {
  const std::vector<Offset> offsets = offsets_of(x);
  parallel_for((int64_t)offsets.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) (x.A == 1 ? weigh<true> : weigh<false>)(x, offsets[i], out);
  });
}

void pair_weights_backward(const WeightInputs& x, const float* grad, float* d_log_gamma, float* d_alpha) {
  const std::vector<Offset> offsets = offsets_of(x);
  const Buffer sums((int64_t)offsets.size() * (1 + x.C));
  parallel_for((int64_t)offsets.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      (x.A == 1 ? add_gradients<true> : add_gradients<false>)(x, offsets[i], grad, sums.data() + i * (1 + x.C));
    }
  });
  // In the order of the offsets, so that the number of threads changes nothing.
  std::fill_n(d_log_gamma, x.C * x.H, 0.0f);
  std::fill_n(d_alpha, x.H, 0.0f);
  for (size_t i = 0; i < offsets.size(); ++i) {
    const float* own = sums.data() + i * (1 + x.C);
    const int64_t h = offsets[i].head;
    d_alpha[h] += own[0] / (float)x.C;
    for (int64_t c = 0; c < x.C; ++c) d_log_gamma[c * x.H + h] += own[1 + c] * x.alpha[h] / (float)x.C;
  }
}

}  // namespace sparseprior

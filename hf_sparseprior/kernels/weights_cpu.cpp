// Weights of the pairs of sparse attention under a decay, on CPUs, and their gradients: along diagonals, and of lists of
// keys.
//
//   weight of (j, j + o) of head h = alpha_h * mean over curves c of gamma_ch^d,  d = |p_c(j + o) - p_c(j)|, summed over axes
//
// Distances are taken from the positions, which stay in a cache; a table of the distances of all pairs would not.
//
// Shapes: H heads, N patches, C curves, A axes of a position, S signed offsets, G images with lists of their own, K places
// of a list. A pair has one weight in both directions, so only offsets of 0 and more are looked at.

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

// ---- lists ------------------------------------------------------------------------------------------------------------

// 16 places of a row's list from `i` on: which of them are patches, and these patches (others are the row itself).
struct Places {
  int32_t patches[L];
  veci there, prefix;
};
SPARSEPRIOR_INLINE Places places_of(const ListedWeightInputs& x, const int32_t* keys, int64_t row, int64_t i) {
  Places own;
  int32_t tokens[L];
  for (int lane = 0; lane < L; ++lane) {
    tokens[lane] = i + lane < x.K ? keys[i + lane] : -1;
    own.patches[lane] = tokens[lane] >= x.P ? tokens[lane] - (int32_t)x.P : (int32_t)row;
  }
  veci token;
  std::memcpy(&token, tokens, sizeof token);
  own.there = token >= (int32_t)x.P;
  own.prefix = (token >= 0) & ~own.there;
  return own;
}

// The curves' powers at these places, one after the other.
template <typename F>
SPARSEPRIOR_INLINE void powers(const ListedWeightInputs& x, int64_t h, int64_t row, const Places& own, const F& use) {
  for (int64_t c = 0; c < x.C; ++c) {
    vec d = vec{};
    for (int64_t a = 0; a < x.A; ++a) {
      const float* p = x.positions + (c * x.A + a) * x.N;
      float keys[L];
      for (int lane = 0; lane < L; ++lane) keys[lane] = p[own.patches[lane]];
      const vec difference = load(keys) - p[row];
      d += maximum(difference, -difference);
    }
    use(c, d, exp2_of(d * (x.log_gamma[c * x.H + h] * LOG2_E)));
  }
}

}  // namespace

void listed_weights(const ListedWeightInputs& x, float* out) {
  parallel_for(x.G * x.H * x.N, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t h = i / x.N % x.H, row = i % x.N;
      const float alpha = x.alpha[h], share = alpha / (float)x.C;
      for (int64_t k = 0; k < x.K; k += L) {
        const Places own = places_of(x, x.keys + i * x.K, row, k);
        vec total = vec{};
        powers(x, h, row, own, [&](int64_t, vec, vec power) { total += power; });
        total = own.there ? total * share : own.prefix ? splat(alpha * x.prefix_gamma[h]) : vec{};
        store_lanes(out + i * x.K + k, total, std::min<int64_t>(L, x.K - k));
      }
    }
  });
}

void listed_weights_backward(
    const ListedWeightInputs& x, const float* grad, float* d_log_gamma, float* d_alpha, float* d_prefix_gamma) {
  // Of each image and head: sums of gradient * power, of the gradients of prefix tokens, and for each curve of
  // gradient * power * distance. Rows are added in float64, of which there may be many.
  const int64_t size = 2 + x.C;
  std::vector<double> sums(x.G * x.H * size);
  parallel_for(x.G * x.H, 1, [&](int64_t begin, int64_t end) {
    const Buffer lanes_of(size * L);
    float* lanes = lanes_of.data();
    for (int64_t i = begin; i < end; ++i) {
      double* own_sums = sums.data() + i * size;
      for (int64_t row = 0; row < x.N; ++row) {
        std::fill_n(lanes, size * L, 0.0f);
        for (int64_t k = 0; k < x.K; k += L) {
          const int64_t first = (i * x.N + row) * x.K;
          const Places own = places_of(x, x.keys + first, row, k);
          const vec all = load_lanes(grad + first + k, 0, x.K - k), g = own.there ? all : vec{};
          store(lanes + L, load(lanes + L) + (own.prefix ? all : vec{}));
          vec total = load(lanes);
          powers(x, i % x.H, row, own, [&](int64_t c, vec d, vec power) {
            const vec weighted = g * power;
            total += weighted;
            store(lanes + L * (2 + c), load(lanes + L * (2 + c)) + weighted * d);
          });
          store(lanes, total);
        }
        for (int64_t n = 0; n < size; ++n) own_sums[n] += sum(load(lanes + L * n));
      }
    }
  });
  for (int64_t h = 0; h < x.H; ++h) {
    std::vector<double> total(size);
    for (int64_t g = 0; g < x.G; ++g) {
      for (int64_t n = 0; n < size; ++n) total[n] += sums[(g * x.H + h) * size + n];
    }
    const double alpha = x.alpha[h];
    d_alpha[h] = (float)(total[0] / (double)x.C + total[1] * x.prefix_gamma[h]);
    d_prefix_gamma[h] = (float)(total[1] * alpha);
    for (int64_t c = 0; c < x.C; ++c) d_log_gamma[c * x.H + h] = (float)(total[2 + c] * alpha / (double)x.C);
  }
}

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

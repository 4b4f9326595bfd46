// Dense attention whose logits are multiplied by a decay, on CPUs, forward and backward. Of the T x T weights only one
// block of query rows is in memory at a time.
//
//   out = softmax(scale * q k^T * W) v,   W = alpha * M among patches, alpha * gamma with a prefix token (VIOLIN Eq. 12)
//   M[j, k] = mean over curves c of gamma_c ^ (sum over axes |position_c(j) - position_c(k)|)
//
// A block of W is formed once for a group of images. gamma to the power of the distance |r_j - r_k| is
// min(u_j w_k, w_j u_k), with u = gamma^r and w = gamma^-r, so no pair needs an exponential. If u or w would leave the
// range of float32, the exponential is computed instead.
//
// Shapes: B batch, H heads, T = P + N tokens, P prefix tokens, D head width, C curves, A axes of a position.
// Work is cut into pieces of (head, group of images) of a fixed size, and their sums are added in the order of the
// pieces, so the result does not depend on the number of threads.

#include <vector>

#include "vectors.h"

namespace sparseprior {
namespace {

constexpr int64_t ROWS = 32;  // query rows of a block
// Bytes of the packed arrays (keys x size) of a group of images. The limit was measured and is larger than a core's
// second cache: images that share the weights of a block save more time than waiting for the third cache costs.
constexpr int64_t GROUP_BYTES = 2 << 20;
constexpr int64_t FORWARD_ARRAYS = 2;   // for each image: keys, values
constexpr int64_t BACKWARD_ARRAYS = 5;  // keys, keys and values as panels, gradients of keys and values
constexpr int64_t MAX_GROUP = 8;
constexpr float LOG2_E = 1.44269504f;
constexpr float SAFE_EXPONENT = 40.0f;  // u and w stay within exp(-40)..exp(40)

struct Problem {
  int64_t B, H, P, N, T, D, C, A;
  int64_t size, keys;  // floats of a packed row, keys in whole vectors
  float scale;
  const float *positions, *log_gamma, *alpha, *prefix_gamma;  // (C, A, N), (C, H), (H), (H)

  explicit Problem(const DecayedInputs& inputs)
      : B(inputs.B), H(inputs.H), P(inputs.P), N(inputs.T - inputs.P), T(inputs.T), D(inputs.q.width), C(inputs.C),
        A(inputs.A), size(packed_width(D)), keys(packed_width(T)), scale(inputs.scale), positions(inputs.positions),
        log_gamma(inputs.log_gamma), alpha(inputs.alpha), prefix_gamma(inputs.prefix_gamma) {}
  int64_t group(int64_t arrays) const {
    return std::clamp<int64_t>(GROUP_BYTES / (arrays * keys * size * (int64_t)sizeof(float)), 1, MAX_GROUP);
  }
  int64_t groups(int64_t arrays) const { return (B + group(arrays) - 1) / group(arrays); }
};

// ---- products of matrices -------------------------------------------------------------------------------------------

// Rows as panels of 16: element i of 16 rows next to each other.
void pack_panels(const float* rows, int64_t count, int64_t size, float* panels) {
  for (int64_t t = 0; t < count; t += L) {
    for (int64_t i = 0; i < size; i += L) {
      vec x[L];
      for (int64_t lane = 0; lane < L; ++lane) x[lane] = load(rows + (t + lane) * size + i);
      transpose(x);
      for (int64_t e = 0; e < L; ++e) store(panels + t * size + (i + e) * L, x[e]);
    }
  }
}

// out[8 rows][16 K keys] = rows . panels.
template <int K>
SPARSEPRIOR_INLINE void row_panel(const float* rows, const float* panels, int64_t size, float* out, int64_t step) {
  vec x[8][K];
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) {
#pragma GCC unroll 2
    for (int k = 0; k < K; ++k) x[r][k] = vec{};
  }
  for (int64_t i = 0; i < size; ++i) {
    vec b[K];
#pragma GCC unroll 2
    for (int k = 0; k < K; ++k) b[k] = load(panels + k * size * L + i * L);
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) {
#pragma GCC unroll 2
      for (int k = 0; k < K; ++k) x[r][k] += rows[r * size + i] * b[k];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) {
#pragma GCC unroll 2
    for (int k = 0; k < K; ++k) store(out + r * step + L * k, x[r][k]);
  }
}
// out (count, keys) = rows (count, size) . keys^T, from panels; rows are read and written in whole eights, up to 7
// more.
void rows_by_panels(int64_t count, const float* rows, const float* panels, int64_t size, int64_t keys, float* out) {
  int64_t t = 0;
  for (; t + 2 * L <= keys; t += 2 * L) {
    for (int64_t r = 0; r < count; r += 8) row_panel<2>(rows + r * size, panels + t * size, size, out + r * keys + t, keys);
  }
  for (; t < keys; t += L) {
    for (int64_t r = 0; r < count; r += 8) row_panel<1>(rows + r * size, panels + t * size, size, out + r * keys + t, keys);
  }
}

// 4 rows of out, S vectors wide: out (+)= sum over t of a[t] of each row * b[t]. `a` steps by `row_step` from row to row
// and by `sum_step` along the sum.
template <int S, bool ADD>
SPARSEPRIOR_INLINE void weighted_rows(
    const float* a, int64_t row_step, int64_t sum_step, int64_t count, const float* b, int64_t size, float* out) {
  vec x[4][S];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) x[r][s] = ADD ? load(out + r * size + L * s) : vec{};
  }
  for (int64_t t = 0; t < count; ++t) {
    vec v[S];
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) v[s] = load(b + t * size + L * s);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const float factor = a[r * row_step + t * sum_step];
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) x[r][s] += factor * v[s];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) store(out + r * size + L * s, x[r][s]);
  }
}
// The same for any number of rows, which are read and written in whole fours, up to 3 more.
template <bool ADD>
void weighted_rows(
    int64_t rows, const float* a, int64_t row_step, int64_t sum_step, int64_t count, const float* b, int64_t size,
    float* out) {
  for (int64_t r = 0; r < rows; r += 4) {
    int64_t i = 0;
    for (; i + 4 * L <= size; i += 4 * L) {
      weighted_rows<4, ADD>(a + r * row_step, row_step, sum_step, count, b + i, size, out + r * size + i);
    }
    for (; i < size; i += L) {
      weighted_rows<1, ADD>(a + r * row_step, row_step, sum_step, count, b + i, size, out + r * size + i);
    }
  }
}

// ---- weights of pairs -----------------------------------------------------------------------------------------------

// gamma^distance of one head. Entries of prefix tokens exist but have no meaning.
class Powers {
 public:
  Powers(const Problem& x, int64_t h) : x_(x), lines_(x.C * x.A), rank_(lines_ * x.keys), up_(lines_ * x.keys), down_(lines_ * x.keys) {
    exact_.resize(lines_);
    for (int64_t i = 0; i < lines_; ++i) {
      const float* positions = x.positions + i * x.N;
      const auto [low, high] = std::minmax_element(positions, positions + x.N);
      const float middle = 0.5f * (*low + *high), rate = x.log_gamma[i / x.A * x.H + h];
      exact_[i] = -rate * (*high - middle) > SAFE_EXPONENT;
      rates_.push_back(rate);
      float *rank = rank_.data() + i * x.keys, *up = up_.data() + i * x.keys, *down = down_.data() + i * x.keys;
      std::fill_n(rank, x.keys, middle);
      std::copy_n(positions, x.N, rank + x.P);
      for (int64_t t = 0; t < x.keys; t += L) {
        const vec exponent = (load(rank + t) - middle) * rate;
        store(up + t, exp_of(exponent));
        store(down + t, exp_of(-exponent));
      }
    }
  }
  // gamma^distance along one axis for R rows from j on and keys t..t + 15, from memory that is read once for all rows.
  template <int R>
  SPARSEPRIOR_INLINE void along(int64_t line, int64_t j, int64_t t, vec out[R]) const {
    const int64_t row = line * x_.keys;
    if (exact_[line]) {
      for (int r = 0; r < R; ++r) out[r] = exp_of(rates_[line] * distance(line, j + r, t));
      return;
    }
    const vec up = load(up_.data() + row + t), down = load(down_.data() + row + t);
    const float *own_up = up_.data() + row + j, *own_down = down_.data() + row + j;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) out[r] = minimum(own_up[r] * down, own_down[r] * up);
  }
  SPARSEPRIOR_INLINE vec distance(int64_t line, int64_t j, int64_t t) const {
    const vec difference = rank_.data()[line * x_.keys + j] - load(rank_.data() + line * x_.keys + t);
    return maximum(difference, -difference);
  }
  // gamma^distance along a curve: the product over its axes.
  template <int R>
  SPARSEPRIOR_INLINE void power(int64_t c, int64_t j, int64_t t, vec out[R]) const {
    along<R>(c * x_.A, j, t, out);
    for (int64_t a = 1; a < x_.A; ++a) {
      vec other[R];
      along<R>(c * x_.A + a, j, t, other);
      for (int r = 0; r < R; ++r) out[r] *= other[r];
    }
  }
  SPARSEPRIOR_INLINE vec distance_of_curve(int64_t c, int64_t j, int64_t t) const {
    vec d = distance(c * x_.A, j, t);
    for (int64_t a = 1; a < x_.A; ++a) d += distance(c * x_.A + a, j, t);
    return d;
  }

  // W for the rows from j0 on and all keys.
  void weights(int64_t h, int64_t j0, float* out) const {
    const int64_t first = std::clamp<int64_t>(x_.P - j0, 0, ROWS), rows = std::min(ROWS, x_.T - j0);
    const float prefix = x_.alpha[h] * x_.prefix_gamma[h];
    std::fill_n(out, std::min(first, rows) * x_.keys, prefix);
    for (int64_t t = 0; t < x_.keys; t += L) {
      int64_t r = first;
      for (; r + 4 <= rows; r += 4) weights_of<4>(h, j0 + r, t, out + r * x_.keys + t);
      for (; r < rows; ++r) weights_of<1>(h, j0 + r, t, out + r * x_.keys + t);
    }
  }
  template <int R>
  SPARSEPRIOR_INLINE void weights_of(int64_t h, int64_t j, int64_t t, float* out) const {
    vec total[R], p[R];
    power<R>(0, j, t, total);
    for (int64_t c = 1; c < x_.C; ++c) {
      power<R>(c, j, t, p);
      for (int r = 0; r < R; ++r) total[r] += p[r];
    }
    for (int r = 0; r < R; ++r) {
      vec value = total[r] * (x_.alpha[h] / (float)x_.C);
      if (t < x_.P) value = lanes(0, x_.P - t) ? splat(x_.alpha[h] * x_.prefix_gamma[h]) : value;
      store(out + r * x_.keys, value);
    }
  }

  // Adds the gradients of alpha, of the prefix gamma and of log gamma (C) that follow from those of W, `grads`.
  void gradients(int64_t h, int64_t j0, const float* grads, float* d_alpha, float* d_prefix, float* d_rate) const {
    const int64_t first = std::clamp<int64_t>(x_.P - j0, 0, ROWS), rows = std::min(ROWS, x_.T - j0);
    vec with_prefix = vec{}, among_patches = vec{};
    std::vector<vec> of_curves(x_.C, vec{});
    for (int64_t r = 0; r < std::min(first, rows); ++r) {
      for (int64_t t = 0; t < x_.keys; t += L) with_prefix += load_lanes(grads + r * x_.keys + t, 0, x_.T - t);
    }
    for (int64_t t = 0; t < x_.keys; t += L) {
      const veci patches = lanes(x_.P - t, x_.T - t), prefix = lanes(0, x_.P - t);
      int64_t r = first;
      for (; r + 4 <= rows; r += 4) {
        gradients_of<4>(j0 + r, t, grads + r * x_.keys + t, patches, prefix, among_patches, with_prefix, of_curves.data());
      }
      for (; r < rows; ++r) {
        gradients_of<1>(j0 + r, t, grads + r * x_.keys + t, patches, prefix, among_patches, with_prefix, of_curves.data());
      }
    }
    const float mean = 1.0f / (float)x_.C, prefix_sum = sum(with_prefix);
    *d_alpha += sum(among_patches) * mean + prefix_sum * x_.prefix_gamma[h];
    *d_prefix += prefix_sum * x_.alpha[h];
    for (int64_t c = 0; c < x_.C; ++c) d_rate[c] += sum(of_curves[c]) * x_.alpha[h] * mean;
  }
  template <int R>
  SPARSEPRIOR_INLINE void gradients_of(
      int64_t j, int64_t t, const float* grads, veci patches, veci prefix, vec& among_patches, vec& with_prefix,
      vec* of_curves) const {
    vec g[R], p[R];
    for (int r = 0; r < R; ++r) {
      const vec all = load(grads + r * x_.keys);
      g[r] = patches ? all : vec{};
      with_prefix += prefix ? all : vec{};
    }
    for (int64_t c = 0; c < x_.C; ++c) {
      power<R>(c, j, t, p);
      vec sum_of = vec{};
      for (int r = 0; r < R; ++r) {
        const vec product = g[r] * p[r];
        among_patches += product;
        sum_of += product * distance_of_curve(c, j + r, t);
      }
      of_curves[c] += sum_of;
    }
  }

 private:
  const Problem& x_;
  int64_t lines_;
  Buffer rank_, up_, down_;
  std::vector<float> rates_;
  std::vector<char> exact_;  // whether the exponential is computed
};

// ---- forward --------------------------------------------------------------------------------------------------------

// Logits of a row: scaled products times weights, -inf after the last key. Gives the largest. The backward pass computes
// them again and subtracts its own largest. A stored logarithm of the sum would be rounded, which at logits of a million
// is an error of 6 % of each probability. Logits are stored before the subtraction, so that both passes round them.
inline float row_logits(const Problem& x, const float* products, const float* weights, float* logits) {
  vec highest = splat(MINUS_INF);
  for (int64_t t = 0; t < x.keys; t += L) {
    vec value = load(products + t) * load(weights + t);
    if (t + L > x.T) value = lanes(0, x.T - t) ? value : splat(MINUS_INF);
    store(logits + t, value);
    highest = maximum(highest, value);
  }
  return maximum(highest);
}

// Scaled products become exp(logit - largest logit); gives 1 / sum.
float softmax(const Problem& x, const float* weights, float* scores) {
  const float top = row_logits(x, scores, weights, scores);
  vec total = vec{};
  for (int64_t t = 0; t < x.keys; t += L) {
    const vec e = exp2_of((load(scores + t) - top) * LOG2_E);
    store(scores + t, e);
    total += e;
  }
  return 1.0f / sum(total);
}

void read_scaled(const View& view, const Problem& x, int64_t b, int64_t h, int64_t j0, float scale, float* to) {
  read_rows(view, b, h, j0, j0 + ROWS, 0, x.T, to);
  if (scale != 1.0f) {
    for (int64_t i = 0; i < ROWS * x.size; i += L) store(to + i, load(to + i) * scale);
  }
}

void forward_group(
    const Problem& x, int64_t h, int64_t b0, int64_t b1, const View& q, const View& k, const View& v, const View& out) {
  const int64_t area = x.keys * x.size, count = b1 - b0;
  const Buffer rows(area), panels(count * area), values(count * area), weights(ROWS * x.keys), scores(ROWS * x.keys),
      query(ROWS * x.size), result(ROWS * x.size);
  for (int64_t b = b0; b < b1; ++b) {
    read_rows(k, b, h, 0, x.keys, 0, x.T, rows.data());
    pack_panels(rows.data(), x.keys, x.size, panels.data() + (b - b0) * area);
    read_rows(v, b, h, 0, x.keys, 0, x.T, values.data() + (b - b0) * area);
  }
  const Powers powers(x, h);
  for (int64_t j0 = 0; j0 < x.T; j0 += ROWS) {
    const int64_t count_rows = std::min(ROWS, x.T - j0);
    powers.weights(h, j0, weights.data());
    for (int64_t b = b0; b < b1; ++b) {
      float share[ROWS];
      read_scaled(q, x, b, h, j0, x.scale, query.data());
      rows_by_panels(count_rows, query.data(), panels.data() + (b - b0) * area, x.size, x.keys, scores.data());
      for (int64_t r = 0; r < count_rows; ++r) {
        share[r] = softmax(x, weights.data() + r * x.keys, scores.data() + r * x.keys);
      }
      weighted_rows<false>(
          count_rows, scores.data(), x.keys, 1, x.T, values.data() + (b - b0) * area, x.size, result.data());
      for (int64_t r = 0; r < count_rows; ++r) {
        float* row = result.data() + r * x.size;
        for (int64_t i = 0; i < x.size; i += L) store(row + i, load(row + i) * share[r]);
      }
      write_rows(result.data(), out, b, h, j0, count_rows);
    }
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------

struct Backward {
  View q, k, v, grad, dq, dk, dv;
};

// One row. The scaled products in `p` become probabilities. The gradients of the probabilities in `ds` become those of
// the scaled products. What the row adds to the gradient of the weights is added to `grads`. `e`: memory for a row.
//
// The mean of the gradients is computed from the row itself. The product of output and its gradient is the same number,
// but the output may be rounded to bfloat16, and the decay's gradients are sums in which such an error stays.
void row_gradients(const Problem& x, const float* weights, float* p, float* ds, float* grads, float* e) {
  const float top = row_logits(x, p, weights, e);
  vec total = vec{}, weighted = vec{};
  for (int64_t t = 0; t < x.keys; t += L) {
    vec value = exp2_of((load(e + t) - top) * LOG2_E);
    if (t + L > x.T) value = lanes(0, x.T - t) ? value : vec{};
    store(e + t, value);
    total += value;
    weighted += value * load(ds + t);
  }
  const float sum_of = sum(total), mean = sum(weighted) / sum_of, share = 1.0f / sum_of;
  for (int64_t t = 0; t < x.keys; t += L) {
    const vec value = load(e + t) * share, d = value * (load(ds + t) - mean);
    store(grads + t, load(grads + t) + d * load(p + t));
    store(ds + t, d * load(weights + t));
    store(p + t, value);
  }
}

// `sums`: gradients of alpha, of the prefix gamma and of log gamma of each curve.
void backward_group(const Problem& x, int64_t h, int64_t b0, int64_t b1, const Backward& f, float* sums) {
  const int64_t area = x.keys * x.size, count = b1 - b0, block = ROWS * x.keys;
  const Buffer keys(count * area), key_panels(count * area), value_panels(count * area), dk(count * area),
      dv(count * area), weights(block), grads(block), p(block), ds(block), e(x.keys), query(ROWS * x.size),
      grad(ROWS * x.size), result(ROWS * x.size);
  for (int64_t b = b0; b < b1; ++b) {
    const int64_t at = (b - b0) * area;
    read_rows(f.v, b, h, 0, x.keys, 0, x.T, keys.data() + at);
    pack_panels(keys.data() + at, x.keys, x.size, value_panels.data() + at);
    read_rows(f.k, b, h, 0, x.keys, 0, x.T, keys.data() + at);
    pack_panels(keys.data() + at, x.keys, x.size, key_panels.data() + at);
  }
  std::fill_n(dk.data(), count * area, 0.0f);
  std::fill_n(dv.data(), count * area, 0.0f);
  std::fill_n(sums, 2 + x.C, 0.0f);
  const Powers powers(x, h);
  for (int64_t j0 = 0; j0 < x.T; j0 += ROWS) {
    const int64_t rows = std::min(ROWS, x.T - j0);
    powers.weights(h, j0, weights.data());
    std::fill_n(grads.data(), rows * x.keys, 0.0f);
    for (int64_t b = b0; b < b1; ++b) {
      const int64_t at = (b - b0) * area;
      read_scaled(f.q, x, b, h, j0, x.scale, query.data());
      read_scaled(f.grad, x, b, h, j0, 1.0f, grad.data());
      rows_by_panels(rows, query.data(), key_panels.data() + at, x.size, x.keys, p.data());
      rows_by_panels(rows, grad.data(), value_panels.data() + at, x.size, x.keys, ds.data());
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = r * x.keys;
        row_gradients(x, weights.data() + row, p.data() + row, ds.data() + row, grads.data() + row, e.data());
      }
      weighted_rows<true>(x.keys, p.data(), 1, x.keys, rows, grad.data(), x.size, dv.data() + at);
      weighted_rows<true>(x.keys, ds.data(), 1, x.keys, rows, query.data(), x.size, dk.data() + at);
      weighted_rows<false>(rows, ds.data(), x.keys, 1, x.T, keys.data() + at, x.size, result.data());
      for (int64_t i = 0; i < rows * x.size; i += L) store(result.data() + i, load(result.data() + i) * x.scale);
      write_rows(result.data(), f.dq, b, h, j0, rows);
    }
    powers.gradients(h, j0, grads.data(), sums, sums + 1, sums + 2);
  }
  for (int64_t b = b0; b < b1; ++b) {
    write_rows(dk.data() + (b - b0) * area, f.dk, b, h, 0, x.T);
    write_rows(dv.data() + (b - b0) * area, f.dv, b, h, 0, x.T);
  }
}

// ---- both passes ----------------------------------------------------------------------------------------------------

template <typename F>
void for_groups(const Problem& x, int64_t arrays, const F& run) {
  const int64_t group = x.group(arrays), groups = x.groups(arrays);
  parallel_for(x.H * groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b0 = i % groups * group;
      run(i, i / groups, b0, std::min(x.B, b0 + group));
    }
  });
}

}  // namespace

int64_t decayed_groups(const DecayedInputs& inputs) { return Problem(inputs).groups(BACKWARD_ARRAYS); }

void decayed_forward(const DecayedInputs& inputs, const View& out) {
  const Problem x(inputs);
  for_groups(x, FORWARD_ARRAYS, [&](int64_t, int64_t h, int64_t b0, int64_t b1) {
    forward_group(x, h, b0, b1, inputs.q, inputs.k, inputs.v, out);
  });
}

void decayed_backward(const DecayedInputs& inputs, const DecayedGradients& f) {
  const Problem x(inputs);
  const Backward views{inputs.q, inputs.k, inputs.v, f.grad, f.dq, f.dk, f.dv};
  for_groups(x, BACKWARD_ARRAYS, [&](int64_t i, int64_t h, int64_t b0, int64_t b1) {
    backward_group(x, h, b0, b1, views, f.sums + i * (2 + x.C));
  });
}

}  // namespace sparseprior

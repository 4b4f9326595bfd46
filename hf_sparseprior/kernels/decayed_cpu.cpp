// Dense attention whose logits are multiplied by a decay, on CPUs, forward and backward. Of the T x T weights only one
// block of query rows is in memory at a time.
//
//   out = softmax(scale * q k^T * W) v,   W = alpha * M among patches, alpha * gamma with a prefix token (VIOLIN Eq. 12)
//   M[j, k] = mean over curves c of gamma_c ^ (sum over axes |position_c(j) - position_c(k)|)
//
// Where the processor multiplies pairs of bfloat16, probabilities and their gradients are rounded to it before they are
// multiplied with values, queries and keys, as in FlashAttention; sums, the softmax and all that the decay's gradients
// need stay float32. Products then come in words of 4 bytes, one float32 or two bfloat16.
//
// A block of W is formed once for a group of images. gamma to the power of the distance |r_j - r_k| is
// min(u_j w_k, w_j u_k), with u = gamma^r and w = gamma^-r, so no pair needs an exponential. So that u and w stay in the
// range of float32, r is cut into segments, and a row counts it from the middle of its own. If there would be too many, the
// exponential is computed instead.
//
// Shapes: B batch, H heads, T = P + N tokens, P prefix tokens, D head width, C curves, A axes of a position.
// Work is cut into pieces of (head, group of images, part of the query rows). Forward, rows do not depend on each other
// and are cut by the number of threads, so that these end together. Backward, the parts have a fixed size and their sums
// are added in the order of the parts. So no result depends on the number of threads.

#include <type_traits>
#include <vector>

#include "vectors.h"

namespace sparseprior {
namespace {

constexpr int64_t MOST_ROWS = 32;  // query rows of a block
constexpr int64_t BLOCK_BYTES = 64 << 10;  // of one array (rows, keys) of a block, while it has 8 rows or more
constexpr int64_t CHUNK = 64;  // terms of a sum whose rows the first cache keeps
// Bytes of the packed arrays (keys x size) of a group of images. The limit was measured and is larger than a core's
// second cache: images that share the weights of a block save more time than waiting for the third cache costs.
constexpr int64_t GROUP_BYTES = 2 << 20;
constexpr int64_t FORWARD_ARRAYS = 2;   // for each image: keys, values
constexpr int64_t BACKWARD_ARRAYS = 5;  // keys, keys and values as panels, gradients of keys and values
constexpr int64_t MAX_GROUP = 8;
constexpr int64_t PACKING_ROWS = 6;  // query rows that take about as long as packing a group's keys and values, by counting operations
constexpr int64_t BACKWARD_PIECES = 12;  // pieces to have at least, so that any usual number of threads shares them well
constexpr int64_t BACKWARD_ROWS = 64;    // while a part keeps so many query rows
constexpr float LOG2_E = 1.44269504f;
constexpr float SAFE_EXPONENT = 40.0f;  // u and w of a segment's own rows stay within exp(-40)..exp(40)
// Those of keys are cut at exp(-80) and exp(80). A power that this changes is below exp(-40), nothing next to the others.
constexpr float CUT_EXPONENT = 80.0f;
constexpr int64_t MOST_SEGMENTS = 16;
constexpr int64_t WEIGHT_CHUNK = 128;  // keys whose u and w stay in the first cache

struct Problem {
  int64_t B, H, P, N, T, D, C, A;
  int64_t size, keys;  // floats of a packed row, keys in whole vectors
  bool halves;         // whether products are of pairs of bfloat16
  int64_t rows;        // query rows of a block
  // The scale, by which queries are multiplied before or, if they are rounded, products after.
  float early_scale, late_scale;
  const float *positions, *log_gamma, *alpha, *prefix_gamma;  // (C, A, N), (C, H), (H), (H)

  explicit Problem(const DecayedInputs& inputs)
      : B(inputs.B), H(inputs.H), P(inputs.P), N(inputs.T - inputs.P), T(inputs.T), D(inputs.q.width), C(inputs.C),
        A(inputs.A), size(packed_width(D)), keys(packed_width(T)), halves(HALF_PRODUCTS && inputs.q.half),
        rows(std::clamp<int64_t>(BLOCK_BYTES / (4 * keys) / 8 * 8, 8, MOST_ROWS)),
        early_scale(halves ? 1.0f : inputs.scale), late_scale(halves ? inputs.scale : 1.0f), positions(inputs.positions),
        log_gamma(inputs.log_gamma), alpha(inputs.alpha), prefix_gamma(inputs.prefix_gamma) {}
  int64_t groups(int64_t arrays) const {
    const int64_t most = std::clamp<int64_t>(GROUP_BYTES / (arrays * keys * size * (halves ? 2 : 4)), 1, MAX_GROUP);
    return (B + most - 1) / most;
  }
  // Images of a group, as evenly as there are groups.
  int64_t group(int64_t arrays) const { return (B + groups(arrays) - 1) / std::max<int64_t>(groups(arrays), 1); }
  int64_t forward_parts() const { return parts_for_threads(H * groups(FORWARD_ARRAYS), T, rows, PACKING_ROWS); }
  int64_t backward_parts() const {
    const int64_t pieces = std::max<int64_t>(H * groups(BACKWARD_ARRAYS), 1);
    return std::min((BACKWARD_PIECES + pieces - 1) / pieces, std::max<int64_t>(T / BACKWARD_ROWS, 1));
  }
};

struct Piece {
  int64_t index, part, head, first_image, last_image, first_row, last_row;
};

// ---- products of matrices -------------------------------------------------------------------------------------------

// Rows of float32 as panels of 16: word i of 16 rows next to each other.
template <typename E>
void pack_panels(const float* rows, int64_t count, int64_t size, float* panels) {
  constexpr int STEP = Elements<E>::VECTORS;
  for (int64_t t = 0; t < count; t += L) {
    for (int64_t i = 0; i < size; i += L) {
      vec x[L];
      for (int64_t lane = 0; lane < L; ++lane) x[lane] = load(rows + (t + lane) * size + i);
      transpose(x);
      for (int64_t e = 0; e < L; e += STEP) Elements<E>::write((E*)(panels + (t * size + (i + e) * L) / STEP), x + e);
    }
  }
}
// Rows of float32 as rows of words that each have one element of neighbouring rows, in `to`, or as they are if a word is
// one element.
template <typename E>
const float* terms_of(const float* rows, int64_t count, int64_t size, float* to) {
  if constexpr (std::is_same_v<E, float>) return rows;
  for (int64_t t = 0; t < count; t += 2) {
    for (int64_t i = 0; i < size; i += L) {
      const vec pair[2] = {load(rows + t * size + i), t + 1 < count ? load(rows + (t + 1) * size + i) : vec{}};
      Elements<Half>::write((Half*)(to + t / 2 * size + i), pair);
    }
  }
  return to;
}
// The same of words that each have neighbouring elements of a row.
template <typename E>
const float* words_of(const float* rows, int64_t count, int64_t size, float* to) {
  if constexpr (std::is_same_v<E, float>) return rows;
  for (int64_t i = 0; i < count * size; i += L) store((Half*)to + i, load(rows + i));
  return to;
}

// out[8 rows][16 K keys] = rows . panels; `words` of a row.
template <typename E, int K>
SPARSEPRIOR_INLINE void row_panel(const float* rows, const float* panels, int64_t words, float* out, int64_t step) {
  typedef Elements<E> Own;
  vec x[8][K];
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) {
#pragma GCC unroll 2
    for (int k = 0; k < K; ++k) x[r][k] = vec{};
  }
  for (int64_t i = 0; i < words; ++i) {
    typename Own::Register b[K];
#pragma GCC unroll 2
    for (int k = 0; k < K; ++k) b[k] = Own::read((const E*)(panels + k * words * L + i * L));
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) {
      const typename Own::Register a = Own::all(rows + r * words + i);
#pragma GCC unroll 2
      for (int k = 0; k < K; ++k) x[r][k] = Own::dot(x[r][k], a, b[k]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) {
#pragma GCC unroll 2
    for (int k = 0; k < K; ++k) store(out + r * step + L * k, x[r][k]);
  }
}
// out (count, keys) = rows (count, words) . keys^T, from panels; rows are read and written in whole eights, up to 7
// more.
template <typename E>
void rows_by_panels(int64_t count, const float* rows, const float* panels, int64_t words, int64_t keys, float* out) {
  int64_t t = 0;
  for (; t + 2 * L <= keys; t += 2 * L) {
    for (int64_t r = 0; r < count; r += 8) {
      row_panel<E, 2>(rows + r * words, panels + t * words, words, out + r * keys + t, keys);
    }
  }
  for (; t < keys; t += L) {
    for (int64_t r = 0; r < count; r += 8) {
      row_panel<E, 1>(rows + r * words, panels + t * words, words, out + r * keys + t, keys);
    }
  }
}

// 4 rows of out, S vectors wide: out (+)= sum over t of word t of each row of `a` * row t of `b`. `a` steps by `row_step`
// from row to row and by `sum_step` along the sum.
template <typename E, int S>
SPARSEPRIOR_INLINE void weighted_rows(
    bool add, const float* a, int64_t row_step, int64_t sum_step, int64_t count, const float* b, int64_t size,
    float* out) {
  typedef Elements<E> Own;
  vec x[4][S];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) x[r][s] = add ? load(out + r * size + L * s) : vec{};
  }
  for (int64_t t = 0; t < count; ++t) {
    typename Own::Register v[S];
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) v[s] = Own::read((const E*)(b + t * size + L * s));
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const typename Own::Register factor = Own::all(a + r * row_step + t * sum_step);
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) x[r][s] = Own::dot(x[r][s], factor, v[s]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) store(out + r * size + L * s, x[r][s]);
  }
}
// The same for any number of rows, which are read and written in whole fours, up to 3 more. Terms come by chunks that the
// first cache keeps for all rows; their order stays.
template <typename E, bool ADD>
void weighted_rows(
    int64_t rows, const float* a, int64_t row_step, int64_t sum_step, int64_t count, const float* b, int64_t size,
    float* out) {
  for (int64_t t = 0; t < count; t += CHUNK) {
    const int64_t terms = std::min(CHUNK, count - t);
    const float *factors = a + t * sum_step, *from = b + t * size;
    for (int64_t r = 0; r < rows; r += 4, factors += 4 * row_step) {
      int64_t i = 0;
      for (; i + 4 * L <= size; i += 4 * L) {
        weighted_rows<E, 4>(ADD || t, factors, row_step, sum_step, terms, from + i, size, out + r * size + i);
      }
      for (; i < size; i += L) {
        weighted_rows<E, 1>(ADD || t, factors, row_step, sum_step, terms, from + i, size, out + r * size + i);
      }
    }
  }
}

// ---- weights of pairs -----------------------------------------------------------------------------------------------

// Positions along one axis of a curve.
struct Line {
  float rate, low, high;
  int64_t segments;  // 0: exponentials are computed
  float middle(int64_t segment) const {
    const float part = ((float)segment + 0.5f) / (float)std::max<int64_t>(segments, 1);
    return (1 - part) * low + part * high;
  }
  int64_t segment(float position) const {
    return std::min<int64_t>(segments - 1, (int64_t)((position - low) / (high - low) * (float)segments));
  }
};
std::vector<Line> lines_of(const Problem& x, int64_t h) {
  std::vector<Line> lines;
  for (int64_t i = 0; i < x.C * x.A; ++i) {
    const float* positions = x.positions + i * x.N;
    const auto [low, high] = std::minmax_element(positions, positions + x.N);
    const float rate = x.log_gamma[i / x.A * x.H + h];
    const float segments = std::ceil(-rate * (*high - *low) / (2 * SAFE_EXPONENT));
    const bool few = segments <= (float)MOST_SEGMENTS;  // not if it is no number
    lines.push_back({rate, *low, *high, few ? std::max<int64_t>(1, (int64_t)segments) : 0});
  }
  return lines;
}

// gamma^distance of one head. Entries of prefix tokens exist but have no meaning.
class Powers {
 public:
  Powers(const Problem& x, int64_t h)
      : x_(x), lines_(lines_of(x, h)), places_(lines_.size() * x.keys), rank_(lines_.size() * x.keys),
        tables_(2 * x.keys * segments()) {
    float* table = tables_.data();
    for (size_t i = 0; i < lines_.size(); ++i) {
      const Line& line = lines_[i];
      float* rank = rank_.data() + i * x.keys;
      std::fill_n(rank, x.keys, line.middle(0));
      std::copy_n(x.positions + i * x.N, x.N, rank + x.P);
      for (int64_t t = x.P; t < x.T && line.segments; ++t) {
        const int64_t before = line.segments > 1 ? line.segment(rank[t]) : 0;
        places_[i * x.keys + t] = (int32_t)(table - tables_.data() + 2 * x.keys * before);
      }
      for (int64_t segment = 0; segment < line.segments; ++segment, table += 2 * x.keys) {
        const float middle = line.middle(segment);
        for (int64_t t = 0; t < x.keys; t += L) {
          const vec exact = (load(rank + t) - middle) * line.rate;
          const vec exponent = maximum(minimum(exact, splat(CUT_EXPONENT)), splat(-CUT_EXPONENT));
          store(table + t, exp_of(exponent));
          store(table + x.keys + t, exp_of(-exponent));
        }
      }
    }
  }
  // gamma^distance along one axis for R rows from j on and keys t..t + 15.
  template <int R>
  SPARSEPRIOR_INLINE void along(int64_t line, int64_t j, int64_t t, vec out[R]) const {
    if (!lines_[line].segments) {
      for (int r = 0; r < R; ++r) out[r] = exp_of(lines_[line].rate * distance(line, j + r, t));
      return;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const float *up = table(line, j + r), *down = up + x_.keys;
      out[r] = minimum(up[j + r] * load(down + t), down[j + r] * load(up + t));
    }
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
    const int64_t first = std::clamp<int64_t>(x_.P - j0, 0, x_.rows), rows = std::min(x_.rows, x_.T - j0);
    const float prefix = x_.alpha[h] * x_.prefix_gamma[h];
    std::fill_n(out, std::min(first, rows) * x_.keys, prefix);
    if (x_.A == 1 && std::all_of(lines_.begin(), lines_.end(), [](const Line& line) { return line.segments; })) {
      for (int64_t t = 0; t < x_.keys; t += WEIGHT_CHUNK) {
        const int64_t end = std::min(x_.keys, t + WEIGHT_CHUNK);
        for (int64_t r = first; r < rows; ++r) {
          float* to = out + r * x_.keys;
          int64_t c = 0;
          for (; c + 4 <= x_.C; c += 4) add_curves<4>(c, j0 + r, t, end, to);
          for (; c < x_.C; ++c) add_curves<1>(c, j0 + r, t, end, to);
          for (int64_t own = t; own < end; own += L) store_weights(h, own, load(to + own), to + own);
        }
      }
      return;
    }
    for (int64_t t = 0; t < x_.keys; t += L) {
      int64_t r = first;
      for (; r + 4 <= rows; r += 4) weights_of<4>(h, j0 + r, t, out + r * x_.keys + t);
      for (; r < rows; ++r) weights_of<1>(h, j0 + r, t, out + r * x_.keys + t);
    }
  }
  // Adds gamma^distance of row j along curves c..c + C - 1, of one axis each, for keys t..end - 1. The first curves begin.
  template <int C>
  SPARSEPRIOR_INLINE void add_curves(int64_t c, int64_t j, int64_t t, int64_t end, float* out) const {
    const float *up[C], *down[C];
    vec own_up[C], own_down[C];
#pragma GCC unroll 4
    for (int i = 0; i < C; ++i) {
      up[i] = table(c + i, j);
      down[i] = up[i] + x_.keys;
      own_up[i] = splat(up[i][j]);
      own_down[i] = splat(down[i][j]);
    }
    for (; t < end; t += L) {
      vec total = c ? load(out + t) : vec{};
#pragma GCC unroll 4
      for (int i = 0; i < C; ++i) total += minimum(own_up[i] * load(down[i] + t), own_down[i] * load(up[i] + t));
      store(out + t, total);
    }
  }
  SPARSEPRIOR_INLINE void store_weights(int64_t h, int64_t t, vec total, float* out) const {
    vec value = total * (x_.alpha[h] / (float)x_.C);
    if (t < x_.P) value = lanes(0, x_.P - t) ? splat(x_.alpha[h] * x_.prefix_gamma[h]) : value;
    store(out, value);
  }
  template <int R>
  SPARSEPRIOR_INLINE void weights_of(int64_t h, int64_t j, int64_t t, float* out) const {
    vec total[R], p[R];
    power<R>(0, j, t, total);
    for (int64_t c = 1; c < x_.C; ++c) {
      power<R>(c, j, t, p);
      for (int r = 0; r < R; ++r) total[r] += p[r];
    }
    for (int r = 0; r < R; ++r) store_weights(h, t, total[r], out + r * x_.keys);
  }

  // Adds the gradients of alpha, of the prefix gamma and of log gamma (C) that follow from those of W, `grads`.
  void gradients(int64_t h, int64_t j0, const float* grads, float* d_alpha, float* d_prefix, float* d_rate) const {
    const int64_t first = std::clamp<int64_t>(x_.P - j0, 0, x_.rows), rows = std::min(x_.rows, x_.T - j0);
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
  int64_t segments() const {
    int64_t total = 0;
    for (const Line& line : lines_) total += line.segments;
    return total;
  }
  // u of all keys as the segment of row j has them; w follows.
  SPARSEPRIOR_INLINE const float* table(int64_t line, int64_t j) const {
    return tables_.data() + places_[line * x_.keys + j];
  }
  const Problem& x_;
  std::vector<Line> lines_;
  std::vector<int32_t> places_;  // of tables, for each line and row
  Buffer rank_, tables_;
};

// ---- forward --------------------------------------------------------------------------------------------------------

// Logits of a row: products times scale and weights, -inf after the last key. Gives the largest. The backward pass computes
// them again and subtracts its own largest. A stored logarithm of the sum would be rounded, which at logits of a million
// is an error of 6 % of each probability. Logits are stored before the subtraction, so that both passes round them.
inline float row_logits(const Problem& x, const float* products, const float* weights, float* logits) {
  vec highest = splat(MINUS_INF);
  for (int64_t t = 0; t < x.keys; t += L) {
    vec value = load(products + t) * x.late_scale * load(weights + t);
    if (t + L > x.T) value = lanes(0, x.T - t) ? value : splat(MINUS_INF);
    store(logits + t, value);
    highest = maximum(highest, value);
  }
  return maximum(highest);
}

// Products become exp(logit - largest logit), of E; gives 1 / sum.
template <typename E>
float softmax(const Problem& x, const float* weights, float* scores) {
  const float top = row_logits(x, scores, weights, scores);
  vec total = vec{};
  for (int64_t t = 0; t < x.keys; t += L) {
    const vec e = exp2_of((load(scores + t) - top) * LOG2_E);
    store((E*)scores + t, e);
    total += e;
  }
  return 1.0f / sum(total);
}

void read_scaled(const View& view, const Problem& x, int64_t b, int64_t h, int64_t j0, float scale, float* to) {
  read_rows(view, b, h, j0, j0 + x.rows, 0, x.T, to);
  if (scale != 1.0f) {
    for (int64_t i = 0; i < x.rows * x.size; i += L) store(to + i, load(to + i) * scale);
  }
}

template <typename E>
void forward_piece(
    const Problem& x, const Piece& piece, const View& q, const View& k, const View& v, const View& out) {
  const int64_t h = piece.head, b0 = piece.first_image, b1 = piece.last_image;
  constexpr int PER_WORD = Elements<E>::VECTORS;
  const int64_t words = x.size / PER_WORD, area = x.keys * words, count = b1 - b0;
  const Buffer rows(x.keys * x.size), panels(count * area), values(count * area), weights(x.rows * x.keys),
      scores(x.rows * x.keys), query(x.rows * x.size), result(x.rows * x.size);
  for (int64_t b = b0; b < b1; ++b) {
    float *own = values.data() + (b - b0) * area, *read = PER_WORD == 1 ? own : rows.data();
    read_rows(k, b, h, 0, x.keys, 0, x.T, rows.data());
    pack_panels<E>(rows.data(), x.keys, x.size, panels.data() + (b - b0) * area);
    read_rows(v, b, h, 0, x.keys, 0, x.T, read);
    terms_of<E>(read, x.keys, x.size, own);
  }
  const Powers powers(x, h);
  for (int64_t j0 = piece.first_row; j0 < piece.last_row; j0 += x.rows) {
    const int64_t count_rows = std::min(x.rows, x.T - j0);
    powers.weights(h, j0, weights.data());
    for (int64_t b = b0; b < b1; ++b) {
      float share[MOST_ROWS];
      read_scaled(q, x, b, h, j0, x.early_scale, query.data());
      const float* queries = words_of<E>(query.data(), x.rows, x.size, query.data());
      rows_by_panels<E>(count_rows, queries, panels.data() + (b - b0) * area, words, x.keys, scores.data());
      for (int64_t r = 0; r < count_rows; ++r) {
        share[r] = softmax<E>(x, weights.data() + r * x.keys, scores.data() + r * x.keys);
      }
      weighted_rows<E, false>(
          count_rows, scores.data(), x.keys, 1, (x.T + PER_WORD - 1) / PER_WORD, values.data() + (b - b0) * area, x.size,
          result.data());
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
  int64_t parts;
  float* partial;  // (B, H, parts, 2, keys, size): what each part adds to dk and dv, if there are several
};

// One row. The products in `p` become probabilities. The gradients of the probabilities in `ds` become those of the
// products. What the row adds to the gradient of the weights is added to `grads`. `e`: memory for a row.
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
    store(grads + t, load(grads + t) + d * (load(p + t) * x.late_scale));
    store(ds + t, d * load(weights + t) * x.late_scale);
    store(p + t, value);
  }
}

// `sums`: gradients of alpha, of the prefix gamma and of log gamma of each curve.
template <typename E>
void backward_piece(const Problem& x, const Piece& piece, const Backward& f, float* sums) {
  const int64_t h = piece.head, b0 = piece.first_image, b1 = piece.last_image;
  constexpr int PER_WORD = Elements<E>::VECTORS;
  const int64_t words = x.size / PER_WORD, area = x.keys * words, whole = x.keys * x.size, count = b1 - b0,
                block = x.rows * x.keys, packed = PER_WORD == 1 ? 0 : 1,  // whether rows and words are not the same
                kept = f.parts > 1 ? 0 : count * 2 * whole;
  const Buffer keys(count * area), key_panels(count * area), value_panels(count * area), own_sums(kept), weights(block), grads(block), p(block), ds(block), e(x.keys), query(x.rows * x.size),
      grad(x.rows * x.size), result(x.rows * x.size), rows_read(packed * whole),
      memory(packed * (block + 4 * x.rows * words));
  float *pair_memory = memory.data(), *row_memory = pair_memory + packed * block;
  const auto dk = [&](int64_t b) {
    if (f.parts == 1) return own_sums.data() + (b - b0) * 2 * whole;
    return f.partial + ((b * x.H + h) * f.parts + piece.part) * 2 * whole;
  };
  for (int64_t b = b0; b < b1; ++b) {
    const int64_t at = (b - b0) * area;
    std::fill_n(dk(b), 2 * whole, 0.0f);
    float* read = PER_WORD == 1 ? keys.data() + at : rows_read.data();
    read_rows(f.v, b, h, 0, x.keys, 0, x.T, read);
    pack_panels<E>(read, x.keys, x.size, value_panels.data() + at);
    read_rows(f.k, b, h, 0, x.keys, 0, x.T, read);
    pack_panels<E>(read, x.keys, x.size, key_panels.data() + at);
    terms_of<E>(read, x.keys, x.size, keys.data() + at);
  }
  std::fill_n(sums, 2 + x.C, 0.0f);
  const Powers powers(x, h);
  for (int64_t j0 = piece.first_row; j0 < piece.last_row; j0 += x.rows) {
    const int64_t rows = std::min(x.rows, x.T - j0), terms = (rows + PER_WORD - 1) / PER_WORD;
    powers.weights(h, j0, weights.data());
    std::fill_n(grads.data(), rows * x.keys, 0.0f);
    for (int64_t b = b0; b < b1; ++b) {
      const int64_t at = (b - b0) * area;
      read_scaled(f.q, x, b, h, j0, x.early_scale, query.data());
      read_scaled(f.grad, x, b, h, j0, 1.0f, grad.data());
      const float *queries = words_of<E>(query.data(), x.rows, x.size, row_memory),
                  *directions = words_of<E>(grad.data(), x.rows, x.size, row_memory + x.rows * words),
                  *query_terms = terms_of<E>(query.data(), x.rows, x.size, row_memory + 2 * x.rows * words),
                  *direction_terms = terms_of<E>(grad.data(), x.rows, x.size, row_memory + 3 * x.rows * words);
      rows_by_panels<E>(rows, queries, key_panels.data() + at, words, x.keys, p.data());
      rows_by_panels<E>(rows, directions, value_panels.data() + at, words, x.keys, ds.data());
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = r * x.keys;
        row_gradients(x, weights.data() + row, p.data() + row, ds.data() + row, grads.data() + row, e.data());
      }
      const float* factors = terms_of<E>(p.data(), rows, x.keys, pair_memory);
      weighted_rows<E, true>(x.keys, factors, 1, x.keys, terms, direction_terms, x.size, dk(b) + whole);
      factors = terms_of<E>(ds.data(), rows, x.keys, pair_memory);
      weighted_rows<E, true>(x.keys, factors, 1, x.keys, terms, query_terms, x.size, dk(b));
      factors = words_of<E>(ds.data(), rows, x.keys, pair_memory);
      weighted_rows<E, false>(
          rows, factors, x.keys / PER_WORD, 1, (x.T + PER_WORD - 1) / PER_WORD, keys.data() + at, x.size,
          result.data());
      for (int64_t i = 0; i < rows * x.size; i += L) store(result.data() + i, load(result.data() + i) * x.early_scale);
      write_rows(result.data(), f.dq, b, h, j0, rows);
    }
    powers.gradients(h, j0, grads.data(), sums, sums + 1, sums + 2);
  }
  for (int64_t b = b0; b < b1 && f.parts == 1; ++b) {
    write_rows(dk(b), f.dk, b, h, 0, x.T);
    write_rows(dk(b) + whole, f.dv, b, h, 0, x.T);
  }
}
// The sums of all parts, one after the other.
void add_parts(const Problem& x, const Backward& f) {
  const int64_t whole = 2 * x.keys * x.size;
  parallel_for(x.B * x.H, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* total = f.partial + i * f.parts * whole;
      for (int64_t part = 1; part < f.parts; ++part) {
        for (int64_t t = 0; t < whole; t += L) store(total + t, load(total + t) + load(total + part * whole + t));
      }
      write_rows(total, f.dk, i / x.H, i % x.H, 0, x.T);
      write_rows(total + whole / 2, f.dv, i / x.H, i % x.H, 0, x.T);
    }
  });
}

// ---- both passes ----------------------------------------------------------------------------------------------------

template <typename F>
void for_pieces(const Problem& x, int64_t arrays, int64_t parts, const F& run) {
  const int64_t group = x.group(arrays), groups = x.groups(arrays), rows = rows_of_part(x.T, x.rows, parts);
  parallel_for(x.H * groups * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t part = i % parts, b0 = i / parts % groups * group, first = std::min(x.T, part * rows);
      run({i, part, i / parts / groups, b0, std::min(x.B, b0 + group), first, std::min(x.T, first + rows)});
    }
  });
}

}  // namespace

int64_t decayed_pieces(const DecayedInputs& inputs) {
  const Problem x(inputs);
  return x.groups(BACKWARD_ARRAYS) * x.backward_parts();
}
int64_t decayed_partial(const DecayedInputs& inputs) {
  const Problem x(inputs);
  const int64_t parts = x.backward_parts();
  return parts > 1 ? x.B * x.H * parts * 2 * x.keys * x.size : 0;
}

void decayed_forward(const DecayedInputs& inputs, const View& out) {
  const Problem x(inputs);
  for_pieces(x, FORWARD_ARRAYS, x.forward_parts(), [&](const Piece& piece) {
    const auto run = x.halves ? forward_piece<Half> : forward_piece<float>;
    run(x, piece, inputs.q, inputs.k, inputs.v, out);
  });
}

void decayed_backward(const DecayedInputs& inputs, const DecayedGradients& f) {
  const Problem x(inputs);
  const Backward views{inputs.q, inputs.k, inputs.v, f.grad, f.dq, f.dk, f.dv, x.backward_parts(), f.partial};
  for_pieces(x, BACKWARD_ARRAYS, views.parts, [&](const Piece& piece) {
    const auto run = x.halves ? backward_piece<Half> : backward_piece<float>;
    run(x, piece, views, f.sums + piece.index * (2 + x.C));
  });
  if (views.parts > 1) add_parts(x, views);
}

}  // namespace sparseprior

// Attention along diagonals on CPUs, forward and backward, without an N x N array and without copies of q, k, v.
//
// Patch token j of head h sees the prefix tokens and the patches j + o, o in the head's signed offsets; prefix tokens see
// everything. Per head the offsets are few, so a row costs a handful of dot products of contiguous memory. Rows are
// taken 16 at a time: the dot products of one offset for 16 rows end up in one vector, in which softmax runs.
//
// Shapes: B batch, H heads, T = P + N tokens, P prefix tokens, D head width, C_h = P + K_h columns of head h (its prefix
// keys, then its offsets), S = sum of C_h. Per-pair arrays are flat: head h begins at B * N * start_h, start_h the sum of
// C before it; in it (b, block of 16 rows, column, row in block).
//
// Work is cut into pieces of (b, h, chunk of rows) of a fixed size, and what pieces share is summed in the order of
// pieces: the result does not depend on the number of threads.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

using at::Tensor;
using std::optional;

constexpr int L = 16;            // rows of a block, lanes of a vector
constexpr int64_t CHUNK = 1024;  // rows of a piece
constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();

typedef float vec __attribute__((vector_size(64)));
typedef int32_t veci __attribute__((vector_size(64)));
typedef uint16_t vech __attribute__((vector_size(32)));
typedef uint32_t vecu __attribute__((vector_size(64)));

inline vec splat(float x) { return vec{} + x; }

inline vec load(const float* p) {
  vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, vec x) { std::memcpy(p, &x, sizeof x); }

inline vec load(const at::BFloat16* p) {
  vech half;
  std::memcpy(&half, p, sizeof half);
  const vecu bits = __builtin_convertvector(half, vecu) << 16;
  vec x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline void store(at::BFloat16* p, vec x) {
  vecu bits;
  std::memcpy(&bits, &x, sizeof x);
  const vecu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  const vecu nan = (vecu)(x != x);
  const vech half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), vech);
  std::memcpy(p, &half, sizeof half);
}

inline vec maximum(vec a, vec b) { return a > b ? a : b; }

inline float sum(vec x) {
  float total = 0;
  for (int i = 0; i < L; ++i) total += x[i];
  return total;
}
inline float maximum(vec x) {
  float top = x[0];
  for (int i = 1; i < L; ++i) top = std::max(top, x[i]);
  return top;
}

// exp of values of at most 0 (and a little above); below -87 it is 0. Relative error below 2e-7.
inline vec exp_of(vec x) {
  const vec low = splat(-87.3f);
  const veci tiny = x < low;
  x = tiny ? low : x;
  const vec shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  veci n;
  std::memcpy(&n, &shifted, sizeof n);
  const vec whole = shifted - 12582912.0f;
  vec r = x - whole * 0.693359375f;
  r = r - whole * -2.12194440e-4f;
  vec y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const veci exponent = (n - 0x4b400000 + 127) << 23;
  vec power;
  std::memcpy(&power, &exponent, sizeof power);
  y = y * power;
  return tiny ? vec{} : y;
}

// Sums of 16 vectors, the sum of x[i] in lane i.
inline vec sums(vec x[L]) {
#define SHUFFLE __builtin_shufflevector
  vec a[8];
  for (int i = 0; i < 8; ++i) {  // lanes of pairs (i, i + 8) side by side
    a[i] = SHUFFLE(x[i], x[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) +
           SHUFFLE(x[i], x[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
  vec b[4];
  for (int i = 0; i < 4; ++i) {
    b[i] = SHUFFLE(a[i], a[i + 4], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) +
           SHUFFLE(a[i], a[i + 4], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
  vec c[2];
  for (int i = 0; i < 2; ++i) {
    c[i] = SHUFFLE(b[i], b[i + 2], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) +
           SHUFFLE(b[i], b[i + 2], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
  return SHUFFLE(c[0], c[1], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) +
         SHUFFLE(c[0], c[1], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#undef SHUFFLE
}

// A head's row in registers: V vectors, D = 16 V. Other widths are copied into rows padded with zeros beforehand.
template <int V>
struct Row {
  vec part[V];
  template <typename T>
  inline void read(const T* p) {
    for (int i = 0; i < V; ++i) part[i] = load(p + L * i);
  }
  template <typename T>
  inline void write(T* p) const {
    for (int i = 0; i < V; ++i) store(p + L * i, part[i]);
  }
  inline void clear() {
    for (int i = 0; i < V; ++i) part[i] = vec{};
  }
  template <typename T>
  inline void add(float factor, const T* p) {
    for (int i = 0; i < V; ++i) part[i] += factor * load(p + L * i);
  }
  inline void scale(float factor) {
    for (int i = 0; i < V; ++i) part[i] *= factor;
  }
};

template <int V, typename T>
inline vec products(const Row<V>& a, const T* b) {
  vec x = a.part[0] * load(b);
  for (int i = 1; i < V; ++i) x += a.part[i] * load(b + L * i);
  return x;
}
template <int V, typename T>
inline vec products(const T* a, const T* b) {
  vec x = load(a) * load(b);
  for (int i = 1; i < V; ++i) x += load(a + L * i) * load(b + L * i);
  return x;
}

// Dot products of 16 rows with 16 rows, or of one row with 16: row r's in lane r. Rows from..to exist, the others give 0.
template <int V, typename T>
inline vec dots(const T* a, int64_t a_step, const T* b, int64_t b_step, int from, int to) {
  vec x[L];
  if (from == 0 && to == L) {
#pragma GCC unroll 16
    for (int r = 0; r < L; ++r) x[r] = products<V>(a + r * a_step, b + r * b_step);
  } else {
    for (int r = 0; r < L; ++r) x[r] = r >= from && r < to ? products<V>(a + r * a_step, b + r * b_step) : vec{};
  }
  return sums(x);
}
template <int V, typename T>
inline vec dots(const Row<V>& a, const T* b, int64_t b_step, int to) {
  vec x[L];
  if (to == L) {
#pragma GCC unroll 16
    for (int r = 0; r < L; ++r) x[r] = products<V>(a, b + r * b_step);
  } else {
    for (int r = 0; r < L; ++r) x[r] = r < to ? products<V>(a, b + r * b_step) : vec{};
  }
  return sums(x);
}

// (b, h, t) to the first of D neighbouring elements.
template <typename T>
struct Rows {
  T* data;
  int64_t batch, head, token;
  explicit Rows(const Tensor& x)
      : data((T*)x.data_ptr()), batch(x.stride(0)), head(x.stride(1)), token(x.stride(2)) {}
  inline T* of(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

struct Layout {
  int64_t B, H, P, N, blocks, chunks, S;
  const int32_t* offsets;         // signed, head after head
  std::vector<int64_t> first;     // index of each head's first offset
  std::vector<int64_t> start;     // columns before each head
  Layout(const Tensor& q, const Tensor& offsets_, const Tensor& counts, int64_t prefix)
      : B(q.size(0)), H(q.size(1)), P(prefix), N(q.size(2) - prefix), offsets(offsets_.data_ptr<int32_t>()) {
    blocks = (N + L - 1) / L;
    chunks = (N + CHUNK - 1) / CHUNK;
    const int32_t* count = counts.data_ptr<int32_t>();
    first.assign(H + 1, 0);
    start.assign(H + 1, 0);
    for (int64_t h = 0; h < H; ++h) {
      first[h + 1] = first[h] + count[h];
      start[h + 1] = start[h] + count[h] + P;
    }
    S = start[H];
  }
  int64_t columns(int64_t h) const { return start[h + 1] - start[h]; }
  int64_t pairs() const { return B * blocks * L * S; }
  // Index of (b, h, block) in a per-pair array.
  int64_t at(int64_t b, int64_t h, int64_t block) const {
    return L * (blocks * (B * start[h] + b * columns(h)) + block * columns(h));
  }
};

// Weights of pairs (decay): W[h, offset][lower row] for offsets, one number per head for pairs with prefix tokens and
// for a patch that only sees itself. Null pointers stand for 1.
struct Weights {
  bool given = false;
  const float* pairs = nullptr;
  const int64_t* begin = nullptr;  // of each signed offset
  const float* prefix = nullptr;
  const float* self = nullptr;
};

// Patches without any key, which see themselves: those nearer to both ends than the smallest offset, without prefix.
struct Alone {
  int64_t smallest;
  bool possible;
  Alone(const int32_t* offsets, int64_t count, int64_t prefix) : smallest(INT64_MAX), possible(prefix == 0) {
    for (int64_t c = 0; c < count; ++c) smallest = std::min<int64_t>(smallest, std::abs(offsets[c]));
  }
  bool at(int64_t j, int64_t N) const { return possible && j < smallest && N - 1 - j < smallest; }
};

inline int64_t lower(int64_t j, int64_t offset) { return offset < 0 ? j + offset : j; }

// Bits of the rows of a block for which the key j + offset exists.
inline void valid_rows(int64_t j0, int64_t rows, int64_t offset, int64_t N, int& from, int& to) {
  from = (int)std::max<int64_t>(0, -offset - j0);
  to = (int)std::min<int64_t>(rows, N - offset - j0);
  if (to < from) to = from;
}

template <typename T, int V>
void forward_piece(
    const Layout& shape, int64_t b, int64_t h, int64_t chunk, const Rows<T>& q, const Rows<T>& k, const Rows<T>& v,
    const Rows<T>& out, float scale, bool zero_fill, const Weights& weight, const float* drop, const float* v_sum,
    float* probs, float* logits, float* floors, float* row_logits, float* partial) {
  const int64_t P = shape.P, N = shape.N;
  const int64_t columns = shape.columns(h), offsets_count = columns - P;
  const int32_t* offsets = shape.offsets + shape.first[h];
  const T *qh = q.of(b, h), *kh = k.of(b, h), *vh = v.of(b, h);
  T* oh = out.of(b, h);
  const T *q_patch = qh + P * q.token, *k_patch = kh + P * k.token, *v_patch = vh + P * v.token;
  const float prefix_weight = scale * (weight.prefix ? weight.prefix[h] : 1.0f);
  const float self_weight = scale * (weight.self ? weight.self[h] : 1.0f);
  std::vector<vec> scratch(2 * (columns + 1));
  vec *s = scratch.data(), *raw = s + columns + 1;
  const Alone alone(offsets, offsets_count, P);
  int64_t furthest = 0;
  for (int64_t c = 0; c < offsets_count; ++c) furthest = std::max<int64_t>(furthest, offsets[c]);
  // The prefix rows' running softmax over this piece's keys.
  std::vector<float> top(P, MINUS_INF), total(P, 0.0f);
  std::vector<Row<V>> sum_row(P), q_row(P);
  for (int64_t p = 0; p < P; ++p) {
    q_row[p].read(qh + p * q.token);
    sum_row[p].clear();
  }
  const int64_t end = std::min(N, (chunk + 1) * CHUNK);
  for (int64_t j0 = chunk * CHUNK; j0 < end; j0 += L) {
    const int rows = (int)std::min<int64_t>(L, end - j0);
    const int64_t block = j0 / L;
    // Rows of a head lie apart in a projection's output, where the hardware does not see the pattern.
    for (int64_t j = j0 + L; j < std::min(N, j0 + 2 * L); ++j) {
      const T *next_q = q_patch + j * q.token, *next_k = k_patch + std::min(j + furthest, N - 1) * k.token,
              *next_v = v_patch + std::min(j + furthest, N - 1) * v.token;
      for (int64_t i = 0; i < V * L; i += 64 / (int64_t)sizeof(T)) {
        __builtin_prefetch(next_q + i);
        __builtin_prefetch(next_k + i);
        __builtin_prefetch(next_v + i);
      }
    }
    const bool inside = rows == L && j0 >= furthest && j0 + L + furthest <= N;  // every key of every row exists
    vec seen = vec{};  // keys of each row
    for (int64_t p = 0; p < P; ++p) {
      Row<V> key;
      key.read(kh + p * k.token);
      raw[p] = dots<V>(key, q_patch + j0 * q.token, q.token, rows) * scale;
      s[p] = raw[p] * (prefix_weight / scale);
    }
    if (P) seen += (float)P;
    for (int64_t c = 0; c < offsets_count; ++c) {
      const int64_t offset = offsets[c];
      int from, to;
      valid_rows(j0, rows, offset, N, from, to);
      vec value =
          dots<V>(q_patch + j0 * q.token, q.token, k_patch + (j0 + offset) * k.token, k.token, from, to) * scale;
      raw[P + c] = value;
      if (weight.given) {
        const float* w = weight.pairs + weight.begin[shape.first[h] + c] + lower(j0, offset);
        vec own = vec{};
        for (int r = from; r < to; ++r) own[r] = w[r];
        value *= own;
      }
      vec valid = vec{};
      if (from == 0 && to == L) {
        valid += 1.0f;
      } else {
        for (int r = 0; r < L; ++r) {
          valid[r] = r >= from && r < to;
          if (!(r >= from && r < to)) value[r] = MINUS_INF;
        }
      }
      seen += valid;
      s[P + c] = value;
    }
    int64_t used = columns;
    if (alone.possible) {
      vec value = splat(MINUS_INF);
      bool any = false;
      for (int r = 0; r < rows; ++r) {
        if (!alone.at(j0 + r, N)) continue;
        value[r] = self_weight * sum(products<V>(q_patch + (j0 + r) * q.token, k_patch + (j0 + r) * k.token));
        seen[r] = 1.0f;
        any = true;
      }
      s[columns] = value;
      used += any;
    }
    vec highest = splat(MINUS_INF);
    for (int64_t c = 0; c < used; ++c) highest = maximum(highest, s[c]);
    const vec outside = splat((float)(P + N)) - seen;
    vec floor_value = vec{};
    if (zero_fill) {
      const veci masked = outside > 0.0f;
      highest = masked ? maximum(highest, vec{}) : highest;
      floor_value = masked ? exp_of(-highest) : vec{};
    }
    for (int r = rows; r < L; ++r) highest[r] = 0.0f;
    vec divisor = outside * floor_value;
    for (int64_t c = 0; c < used; ++c) {
      s[c] = exp_of(s[c] - highest);
      divisor += s[c];
    }
    const vec share = 1.0f / divisor;
    floor_value *= share;
    for (int64_t c = 0; c < used; ++c) s[c] *= share;
    if (probs) {
      float* own = probs + shape.at(b, h, block);
      for (int64_t c = 0; c < columns; ++c) store(own + L * c, s[c]);
    }
    if (logits) {
      float* own = logits + shape.at(b, h, block);
      for (int64_t c = 0; c < columns; ++c) store(own + L * c, raw[c]);
    }
    if (floors) store(floors + L * ((b * shape.H + h) * shape.blocks + block), floor_value);
    if (drop) {
      const float* own = drop + shape.at(b, h, block);
      for (int64_t c = 0; c < columns; ++c) s[c] *= load(own + L * c);
    }
    if (zero_fill) {
      for (int64_t c = 0; c < used; ++c) s[c] -= floor_value;
    }
    for (int r = 0; r < rows; ++r) {
      Row<V> result;
      if (zero_fill) {
        result.read(v_sum);
        result.scale(floor_value[r]);
      } else {
        result.clear();
      }
      const int64_t j = j0 + r;
      for (int64_t p = 0; p < P; ++p) result.add(s[p][r], vh + p * v.token);
      if (inside) {
        for (int64_t c = 0; c < offsets_count; ++c) result.add(s[P + c][r], v_patch + (j + offsets[c]) * v.token);
      } else {
        for (int64_t c = 0; c < offsets_count; ++c) {
          const int64_t key = j + offsets[c];
          if (key >= 0 && key < N) result.add(s[P + c][r], v_patch + key * v.token);
        }
      }
      if (used > columns && alone.at(j, N)) result.add(s[columns][r], v_patch + j * v.token);
      result.write(oh + (P + j) * out.token);
    }
    // These rows as keys of the prefix tokens, while they are near.
    for (int64_t p = 0; p < P; ++p) {
      vec value = dots<V>(q_row[p], k_patch + j0 * k.token, k.token, rows) * prefix_weight;
      float* own = row_logits + ((b * shape.H + h) * P + p) * (P + N) + P + j0;
      for (int r = 0; r < rows; ++r) own[r] = value[r];
      for (int r = rows; r < L; ++r) value[r] = MINUS_INF;
      const float higher = std::max(top[p], maximum(value));
      if (higher > top[p]) {
        const float shrink = std::exp(top[p] - higher);
        sum_row[p].scale(shrink);
        total[p] *= shrink;
        top[p] = higher;
      }
      const vec e = exp_of(value - higher);
      total[p] += sum(e);
      vec kept = e;
      if (drop) {
        // the prefix rows' dropout follows all per-pair values
        const float* row_drop = drop + shape.pairs() + ((b * shape.H + h) * P + p) * (P + N) + P + j0;
        for (int r = 0; r < rows; ++r) kept[r] *= row_drop[r];
      }
      for (int r = 0; r < rows; ++r) sum_row[p].add(kept[r], v_patch + (j0 + r) * v.token);
    }
  }
  for (int64_t p = 0; p < P; ++p) {
    float* own = partial + (((b * shape.H + h) * shape.chunks + chunk) * P + p) * (2 + L * V);
    own[0] = top[p];
    own[1] = total[p];
    sum_row[p].write(own + 2);
  }
}

// Prefix rows: the pieces' sums and the prefix keys; the logits become probabilities where they are kept.
template <typename T, int V>
void finish_prefix_row(
    const Layout& shape, int64_t b, int64_t h, int64_t p, const Rows<T>& q, const Rows<T>& k, const Rows<T>& v,
    const Rows<T>& out, float factor, const float* drop, float* row_logits, const float* partial, bool keep) {
  const int64_t P = shape.P, total_tokens = P + shape.N;
  const T *qh = q.of(b, h), *kh = k.of(b, h), *vh = v.of(b, h);
  float* own = row_logits + ((b * shape.H + h) * P + p) * total_tokens;
  float top = MINUS_INF;
  for (int64_t t = 0; t < P; ++t) {
    own[t] = factor * sum(products<V>(qh + p * q.token, kh + t * k.token));
    top = std::max(top, own[t]);
  }
  const float* pieces = partial + (b * shape.H + h) * shape.chunks * P * (2 + L * V);
  for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) top = std::max(top, pieces[(chunk * P + p) * (2 + L * V)]);
  Row<V> result;
  result.clear();
  float total = 0.0f;
  const float* row_drop = drop ? drop + shape.pairs() + ((b * shape.H + h) * P + p) * total_tokens : nullptr;
  for (int64_t t = 0; t < P; ++t) {
    const float e = std::exp(own[t] - top);
    total += e;
    result.add(row_drop ? e * row_drop[t] : e, vh + t * v.token);
  }
  for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
    const float* piece = pieces + (chunk * P + p) * (2 + L * V);
    const float shrink = std::exp(piece[0] - top);
    total += shrink * piece[1];
    result.add(shrink, piece + 2);
  }
  result.scale(1.0f / total);
  result.write(out.of(b, h) + p * out.token);
  if (!keep) return;
  int64_t t = 0;
  const vec share = splat(1.0f / total);
  for (; t + L <= total_tokens; t += L) store(own + t, exp_of(load(own + t) - top) * share);
  for (; t < total_tokens; ++t) own[t] = std::exp(own[t] - top) / total;
}


// ---- backward -------------------------------------------------------------------------------------------------------

// What pieces of one (b, h) add up, in floats: of each prefix token the gradients of its key, value and query, then the
// sum of floor * gradient of the rows, then the gradients of the prefix weight and of the self weight.
template <int V>
struct Sums {
  static constexpr int64_t ROW = L * V;
  static int64_t size(int64_t P) { return (3 * P + 1) * ROW + 2; }
};

struct Saved {
  const float *probs, *logits, *floors, *rows, *drop;
};

// Gradients of the queries of a piece, and of the logits of all its pairs.
template <typename T, int V>
void backward_rows(
    const Layout& shape, int64_t b, int64_t h, int64_t chunk, const Rows<T>& q, const Rows<T>& k, const Rows<T>& v,
    const Rows<T>& out, const Rows<T>& grad, const Rows<T>& dq, float scale, bool zero_fill, const Weights& weight,
    const Saved& saved, float* pair_grads, float* weight_grads, float* row_grads, float* self_grads, float* sums_of) {
  const int64_t P = shape.P, N = shape.N, columns = shape.columns(h), offsets_count = columns - P;
  const int32_t* offsets = shape.offsets + shape.first[h];
  const T *qh = q.of(b, h), *kh = k.of(b, h), *vh = v.of(b, h), *oh = out.of(b, h), *gh = grad.of(b, h);
  T* dqh = dq.of(b, h);
  const T *q_patch = qh + P * q.token, *k_patch = kh + P * k.token, *v_patch = vh + P * v.token;
  const T *o_patch = oh + P * out.token, *g_patch = gh + P * grad.token;
  const float prefix_weight = scale * (weight.prefix ? weight.prefix[h] : 1.0f);
  const float self_weight = scale * (weight.self ? weight.self[h] : 1.0f);
  const int64_t total_tokens = P + N, row_base = (b * shape.H + h) * P;
  const Alone alone(offsets, offsets_count, P);
  std::vector<vec> scratch(columns + 1);
  vec* g = scratch.data();
  std::vector<Row<V>> dkey(P), dvalue(P), dquery(P), q_row(P), g_row(P);
  std::vector<float> delta_row(P);
  for (int64_t p = 0; p < P; ++p) {
    q_row[p].read(qh + p * q.token);
    g_row[p].read(gh + p * grad.token);
    delta_row[p] = sum(products<V>(g_row[p], oh + p * out.token));
    dkey[p].clear();
    dvalue[p].clear();
    dquery[p].clear();
  }
  Row<V> floor_sum;
  floor_sum.clear();
  vec prefix_sum = vec{};
  float self_sum = 0.0f;
  const int64_t end = std::min(N, (chunk + 1) * CHUNK);
  for (int64_t j0 = chunk * CHUNK; j0 < end; j0 += L) {
    const int rows = (int)std::min<int64_t>(L, end - j0);
    const int64_t block = j0 / L, at = shape.at(b, h, block);
    const float *probs = saved.probs + at, *drop = saved.drop ? saved.drop + at : nullptr;
    const vec delta = dots<V>(g_patch + j0 * grad.token, grad.token, o_patch + j0 * out.token, out.token, 0, rows);
    const vec floor_value =
        zero_fill ? load(saved.floors + L * ((b * shape.H + h) * shape.blocks + block)) : vec{};
    for (int64_t c = 0; c < columns; ++c) {
      vec dp;
      if (c < P) {
        Row<V> value;
        value.read(vh + c * v.token);
        dp = dots<V>(value, g_patch + j0 * grad.token, grad.token, rows);
      } else {
        int from, to;
        valid_rows(j0, rows, offsets[c - P], N, from, to);
        dp = dots<V>(
            g_patch + j0 * grad.token, grad.token, v_patch + (j0 + offsets[c - P]) * v.token, v.token, from, to);
      }
      if (drop) dp *= load(drop + L * c);
      vec ds = load(probs + L * c) * (dp - delta);
      if (weight.given) {
        const vec product = ds * load(saved.logits + at + L * c);
        if (c < P) {
          prefix_sum += product;
        } else {
          store(weight_grads + at + L * c, product);
          const float* w = weight.pairs + weight.begin[shape.first[h] + c - P] + lower(j0, offsets[c - P]);
          int from, to;
          valid_rows(j0, rows, offsets[c - P], N, from, to);
          vec own = vec{};
          for (int r = from; r < to; ++r) own[r] = w[r];
          ds *= own;
        }
      }
      ds *= c < P ? prefix_weight : scale;
      g[c] = ds;
      store(pair_grads + at + L * c, ds);
    }
    for (int r = 0; r < rows; ++r) {
      const int64_t j = j0 + r;
      Row<V> result;
      result.clear();
      for (int64_t p = 0; p < P; ++p) result.add(g[p][r], kh + p * k.token);
      for (int64_t c = 0; c < offsets_count; ++c) {
        const int64_t key = j + offsets[c];
        if (key >= 0 && key < N) result.add(g[P + c][r], k_patch + key * k.token);
      }
      if (alone.at(j, N)) {
        // Its probability is 1, unless masked pairs keep exp(0).
        float probability = 1.0f, gradient = 0.0f;
        if (zero_fill && floor_value[r] > 0.0f) {
          const float dot = sum(products<V>(q_patch + j * q.token, k_patch + j * k.token));
          probability = std::min(1.0f, std::exp(self_weight * dot + std::log(floor_value[r])));
          const float dp = sum(products<V>(g_patch + j * grad.token, v_patch + j * v.token));
          const float ds = probability * (dp - delta[r]);
          self_sum += ds * dot * scale;
          gradient = ds * self_weight;
          result.add(gradient, k_patch + j * k.token);
        }
        float* own = self_grads + 2 * ((b * shape.H + h) * N + j);
        own[0] = gradient;
        own[1] = probability * (drop ? 0.0f : 1.0f) - floor_value[r];
        if (drop) own[1] = probability;
      }
      result.write(dqh + (P + j) * dq.token);
      if (zero_fill) floor_sum.add(floor_value[r], g_patch + j * grad.token);
    }
    for (int64_t p = 0; p < P; ++p) {
      // This block's rows as queries of the prefix keys.
      vec kept = load(probs + L * p) * (drop ? load(drop + L * p) : splat(1.0f)) - floor_value;
      for (int r = 0; r < rows; ++r) {
        dkey[p].add(g[p][r], q_patch + (j0 + r) * q.token);
        dvalue[p].add(kept[r], g_patch + (j0 + r) * grad.token);
      }
      // And as keys of the prefix rows.
      const int64_t first = (row_base + p) * total_tokens + P + j0;
      vec dp = dots<V>(g_row[p], v_patch + j0 * v.token, v.token, rows);
      vec probability = vec{};
      for (int r = 0; r < rows; ++r) {
        probability[r] = saved.rows[first + r];
        if (saved.drop) dp[r] *= saved.drop[shape.pairs() + first + r];
      }
      const vec ds = probability * (dp - delta_row[p]);
      if (weight.given) prefix_sum += ds * dots<V>(q_row[p], k_patch + j0 * k.token, k.token, rows) * scale;
      const vec gradient = ds * prefix_weight;
      for (int r = 0; r < rows; ++r) {
        row_grads[first + r] = gradient[r];
        dquery[p].add(gradient[r], k_patch + (j0 + r) * k.token);
      }
    }
  }
  constexpr int64_t ROW = Sums<V>::ROW;
  for (int64_t p = 0; p < P; ++p) {
    dkey[p].write(sums_of + (3 * p) * ROW);
    dvalue[p].write(sums_of + (3 * p + 1) * ROW);
    dquery[p].write(sums_of + (3 * p + 2) * ROW);
  }
  floor_sum.write(sums_of + 3 * P * ROW);
  sums_of[(3 * P + 1) * ROW] = sum(prefix_sum);
  sums_of[(3 * P + 1) * ROW + 1] = self_sum;
}

// Prefix tokens among themselves, and the sums of all pieces; the first piece's sums become the whole.
template <typename T, int V>
void backward_prefix(
    const Layout& shape, int64_t b, int64_t h, const Rows<T>& q, const Rows<T>& k, const Rows<T>& v, const Rows<T>& out,
    const Rows<T>& grad, const Rows<T>& dq, const Rows<T>& dk, const Rows<T>& dv, float scale, const Weights& weight,
    const Saved& saved, float* row_grads, float* sums_of) {
  const int64_t P = shape.P, total_tokens = P + shape.N, size = Sums<V>::size(P), row_base = (b * shape.H + h) * P;
  constexpr int64_t ROW = Sums<V>::ROW;
  for (int64_t chunk = 1; chunk < shape.chunks; ++chunk) {
    for (int64_t i = 0; i < size; ++i) sums_of[i] += sums_of[chunk * size + i];
  }
  const T *qh = q.of(b, h), *kh = k.of(b, h), *vh = v.of(b, h), *oh = out.of(b, h), *gh = grad.of(b, h);
  const float prefix_weight = scale * (weight.prefix ? weight.prefix[h] : 1.0f);
  float weight_sum = sums_of[(3 * P + 1) * ROW];
  for (int64_t p = 0; p < P; ++p) {
    const T *query = qh + p * q.token, *gradient = gh + p * grad.token;
    const float delta = sum(products<V>(gradient, oh + p * out.token));
    for (int64_t t = 0; t < P; ++t) {
      const int64_t at = (row_base + p) * total_tokens + t;
      const float dropped = saved.drop ? saved.drop[shape.pairs() + at] : 1.0f;
      const float ds = saved.rows[at] * (dropped * sum(products<V>(gradient, vh + t * v.token)) - delta);
      weight_sum += ds * sum(products<V>(query, kh + t * k.token)) * scale;
      row_grads[at] = ds * prefix_weight;
      Row<V> row;
      row.read(sums_of + (3 * p + 2) * ROW);
      row.add(ds * prefix_weight, kh + t * k.token);
      row.write(sums_of + (3 * p + 2) * ROW);
      row.read(sums_of + (3 * t) * ROW);
      row.add(ds * prefix_weight, query);
      row.write(sums_of + (3 * t) * ROW);
      row.read(sums_of + (3 * t + 1) * ROW);
      row.add(saved.rows[at] * dropped, gradient);
      row.write(sums_of + (3 * t + 1) * ROW);
    }
  }
  sums_of[(3 * P + 1) * ROW] = weight_sum;
  for (int64_t p = 0; p < P; ++p) {
    Row<V> row;
    row.read(sums_of + (3 * p) * ROW);
    row.write(dk.of(b, h) + p * dk.token);
    row.read(sums_of + (3 * p + 1) * ROW);
    row.add(1.0f, sums_of + 3 * P * ROW);
    row.write(dv.of(b, h) + p * dv.token);
    row.read(sums_of + (3 * p + 2) * ROW);
    row.write(dq.of(b, h) + p * dq.token);
  }
}

// Gradients of keys and values: each key gathers from the rows that see it.
template <typename T, int V>
void backward_keys(
    const Layout& shape, int64_t b, int64_t h, int64_t chunk, const Rows<T>& q, const Rows<T>& grad, const Rows<T>& dk,
    const Rows<T>& dv, bool zero_fill, const Saved& saved, const float* pair_grads, const float* row_grads,
    const float* self_grads, const float* sums_of) {
  const int64_t P = shape.P, N = shape.N, columns = shape.columns(h), offsets_count = columns - P;
  const int32_t* offsets = shape.offsets + shape.first[h];
  const T *qh = q.of(b, h), *gh = grad.of(b, h);
  const T *q_patch = qh + P * q.token, *g_patch = gh + P * grad.token;
  const int64_t base = shape.at(b, h, 0), row_base = (b * shape.H + h) * P, total_tokens = P + N;
  const Alone alone(offsets, offsets_count, P);
  const int64_t end = std::min(N, (chunk + 1) * CHUNK);
  for (int64_t m = chunk * CHUNK; m < end; ++m) {
    Row<V> dkey, dvalue;
    dkey.clear();
    if (zero_fill) {
      dvalue.read(sums_of + 3 * P * Sums<V>::ROW);
    } else {
      dvalue.clear();
    }
    for (int64_t c = 0; c < offsets_count; ++c) {
      const int64_t j = m - offsets[c];
      if (j < 0 || j >= N) continue;
      const int64_t at = base + L * ((j / L) * columns + P + c) + j % L;
      float kept = saved.probs[at];
      if (saved.drop) kept *= saved.drop[at];
      if (zero_fill) kept -= saved.floors[L * (b * shape.H + h) * shape.blocks + j];
      dkey.add(pair_grads[at], q_patch + j * q.token);
      dvalue.add(kept, g_patch + j * grad.token);
    }
    for (int64_t p = 0; p < P; ++p) {
      const int64_t at = (row_base + p) * total_tokens + P + m;
      const float kept = saved.rows[at] * (saved.drop ? saved.drop[shape.pairs() + at] : 1.0f);
      dkey.add(row_grads[at], qh + p * q.token);
      dvalue.add(kept, gh + p * grad.token);
    }
    if (alone.at(m, N)) {
      const float* own = self_grads + 2 * ((b * shape.H + h) * N + m);
      dkey.add(own[0], q_patch + m * q.token);
      dvalue.add(own[1], g_patch + m * grad.token);
    }
    dkey.write(dk.of(b, h) + (P + m) * dk.token);
    dvalue.write(dv.of(b, h) + (P + m) * dv.token);
  }
}

// A tensor (B, H, T, D) in memory as (B, T, H, D), as projections want it.
Tensor like_projection(const Tensor& q) {
  return at::empty({q.size(0), q.size(2), q.size(1), q.size(3)}, q.options()).transpose(1, 2);
}

int64_t vectors(int64_t width) {
  for (const int64_t compiled : {1, 2, 4, 5, 8, 16}) {
    if (width <= L * compiled) return compiled;
  }
  TORCH_CHECK(false, "head width ", width, " must be at most 256");
}

// Rows whose elements are neighbours and fill whole vectors; a copy only where they are not.
Tensor usable(const Tensor& x) {
  const int64_t width = x.size(3);
  const int64_t full = L * vectors(width);
  if (width != full) return at::constant_pad_nd(x, {0, full - width});
  return x.stride(3) == 1 ? x : x.contiguous();
}

Weights weights_of(
    const optional<Tensor>& pairs, const optional<Tensor>& begin, const optional<Tensor>& prefix,
    const optional<Tensor>& self) {
  Weights weight;
  if (pairs) {
    weight.given = true;
    weight.pairs = pairs->data_ptr<float>();
    weight.begin = begin->data_ptr<int64_t>();
    weight.prefix = prefix->data_ptr<float>();
    weight.self = self->data_ptr<float>();
  }
  return weight;
}

// Widths that are compiled; others are padded with zeros to the next.
#define FOR_WIDTH(V_, ...)                                               \
  switch (V_) {                                                          \
    case 1: { constexpr int V = 1; __VA_ARGS__; break; }                 \
    case 2: { constexpr int V = 2; __VA_ARGS__; break; }                 \
    case 4: { constexpr int V = 4; __VA_ARGS__; break; }                 \
    case 5: { constexpr int V = 5; __VA_ARGS__; break; }                 \
    case 8: { constexpr int V = 8; __VA_ARGS__; break; }                 \
    default: { constexpr int V = 16; __VA_ARGS__; break; }               \
  }

template <typename F>
void for_type(at::ScalarType type, F run) {
  if (type == at::kFloat) {
    run(float());
  } else {
    TORCH_CHECK(type == at::kBFloat16, "dtype ", type, " must be float32 or bfloat16");
    run(at::BFloat16());
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& offsets, const Tensor& counts, int64_t prefix,
    double scale, bool zero_fill, const optional<Tensor>& pair_weights, const optional<Tensor>& pair_begin,
    const optional<Tensor>& prefix_weight, const optional<Tensor>& self_weight, const optional<Tensor>& drop,
    bool keep) {
  const int64_t width = q_.size(3);
  const Tensor q = usable(q_), k = usable(k_), v = usable(v_);
  Tensor out = like_projection(q);
  const Layout shape(q, offsets, counts, prefix);
  const auto floats = q.options().dtype(at::kFloat);
  const bool decayed = pair_weights.has_value();
  Tensor probs = at::empty({keep ? shape.pairs() : 0}, floats);
  Tensor logits = at::empty({keep && decayed ? shape.pairs() : 0}, floats);
  Tensor floors = at::empty({keep && zero_fill ? shape.B * shape.H * shape.blocks * L : 0}, floats);
  Tensor row_logits = at::empty({shape.B, shape.H, prefix, prefix + shape.N}, floats);
  const int64_t V_ = vectors(width);
  Tensor partial = at::empty({shape.B * shape.H * shape.chunks * prefix * (2 + L * V_)}, floats);
  Tensor v_sum = zero_fill ? v.sum(2, false, at::kFloat).contiguous() : at::empty({0}, floats);
  const Weights weight = weights_of(pair_weights, pair_begin, prefix_weight, self_weight);
  const float* dropped = drop ? drop->data_ptr<float>() : nullptr;
  const int64_t heads = shape.B * shape.H;
  for_type(q.scalar_type(), [&](auto zero) {
      using scalar_t = decltype(zero);
      const Rows<scalar_t> qr(q), kr(k), vr(v), outr(out);
      FOR_WIDTH(V_, {
        at::parallel_for(0, heads * shape.chunks, 1, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t bh = i / shape.chunks, b = bh / shape.H, h = bh % shape.H;
            forward_piece<scalar_t, V>(
                shape, b, h, i % shape.chunks, qr, kr, vr, outr, (float)scale, zero_fill, weight, dropped,
                zero_fill ? v_sum.data_ptr<float>() + bh * L * V : nullptr, keep ? probs.data_ptr<float>() : nullptr,
                keep && decayed ? logits.data_ptr<float>() : nullptr,
                keep && zero_fill ? floors.data_ptr<float>() : nullptr, row_logits.data_ptr<float>(),
                partial.data_ptr<float>());
            if (shape.chunks == 1) {
              const float factor = (float)scale * (weight.prefix ? weight.prefix[h] : 1.0f);
              for (int64_t p = 0; p < prefix; ++p) {
                finish_prefix_row<scalar_t, V>(
                    shape, b, h, p, qr, kr, vr, outr, factor, dropped, row_logits.data_ptr<float>(),
                    partial.data_ptr<float>(), keep);
              }
            }
          }
        });
        if (shape.chunks != 1 && prefix) {
          at::parallel_for(0, heads * prefix, 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
              const int64_t bh = i / prefix, h = bh % shape.H;
              const float factor = (float)scale * (weight.prefix ? weight.prefix[h] : 1.0f);
              finish_prefix_row<scalar_t, V>(
                  shape, bh / shape.H, h, i % prefix, qr, kr, vr, outr, factor, dropped,
                  row_logits.data_ptr<float>(), partial.data_ptr<float>(), keep);
            }
          });
        }
      });
  });
  if (out.size(3) != width) out = out.narrow(3, 0, width);
  if (!keep) row_logits = at::empty({0}, floats);
  return {out, probs, logits, floors, row_logits};
}

// Gradients of q, k, v and, with a decay, of pair_weights, prefix_weight and self_weight (else empty).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_, const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& out_,
    const Tensor& offsets, const Tensor& counts, int64_t prefix, double scale, bool zero_fill,
    const optional<Tensor>& pair_weights, const optional<Tensor>& pair_begin, const optional<Tensor>& prefix_weight,
    const optional<Tensor>& self_weight, const optional<Tensor>& drop, const Tensor& probs, const Tensor& logits,
    const Tensor& floors, const Tensor& rows) {
  const int64_t width = q_.size(3);
  const Tensor q = usable(q_), k = usable(k_), v = usable(v_), out = usable(out_), grad = usable(grad_);
  Tensor dq = like_projection(q), dk = like_projection(q), dv = like_projection(q);
  const Layout shape(q, offsets, counts, prefix);
  const auto floats = q.options().dtype(at::kFloat);
  const int64_t heads = shape.B * shape.H;
  const Weights weight = weights_of(pair_weights, pair_begin, prefix_weight, self_weight);
  Tensor pair_grads = at::empty({shape.pairs()}, floats), row_grads = at::empty_like(rows);
  Tensor weight_grads = at::empty({weight.given ? shape.pairs() : 0}, floats);
  Tensor self_grads = at::empty({prefix ? 0 : 2 * heads * shape.N}, floats);
  const Saved saved{
      probs.data_ptr<float>(), logits.data_ptr<float>(), floors.data_ptr<float>(), rows.data_ptr<float>(),
      drop ? drop->data_ptr<float>() : nullptr};
  Tensor d_pairs = at::zeros({pair_weights ? pair_weights->numel() : 0}, floats);
  Tensor d_prefix = at::zeros({pair_weights ? shape.H : 0}, floats), d_self = at::zeros_like(d_prefix);
  for_type(q.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    const Rows<scalar_t> qr(q), kr(k), vr(v), outr(out), gradr(grad), dqr(dq), dkr(dk), dvr(dv);
    FOR_WIDTH(vectors(width), {
      const int64_t size = Sums<V>::size(prefix);
      Tensor sums_of = at::empty({heads * shape.chunks * size}, floats);
      float *sums_data = sums_of.data_ptr<float>(), *rows_data = row_grads.data_ptr<float>();
      const auto rows_of = [&](int64_t bh, int64_t chunk) {
        backward_rows<scalar_t, V>(
            shape, bh / shape.H, bh % shape.H, chunk, qr, kr, vr, outr, gradr, dqr, (float)scale, zero_fill, weight,
            saved, pair_grads.data_ptr<float>(), weight_grads.data_ptr<float>(), rows_data,
            self_grads.data_ptr<float>(), sums_data + (bh * shape.chunks + chunk) * size);
      };
      const auto prefix_of = [&](int64_t bh) {
        backward_prefix<scalar_t, V>(
            shape, bh / shape.H, bh % shape.H, qr, kr, vr, outr, gradr, dqr, dkr, dvr, (float)scale, weight, saved,
            rows_data, sums_data + bh * shape.chunks * size);
      };
      const auto keys_of = [&](int64_t bh, int64_t chunk) {
        backward_keys<scalar_t, V>(
            shape, bh / shape.H, bh % shape.H, chunk, qr, gradr, dkr, dvr, zero_fill, saved,
            pair_grads.data_ptr<float>(), rows_data, self_grads.data_ptr<float>(),
            sums_data + bh * shape.chunks * size);
      };
      if (shape.chunks == 1) {
        at::parallel_for(0, heads, 1, [&](int64_t begin, int64_t end) {
          for (int64_t bh = begin; bh < end; ++bh) {
            rows_of(bh, 0);
            prefix_of(bh);
            keys_of(bh, 0);
          }
        });
      } else {
        const auto pieces = [&](const auto& work) {
          at::parallel_for(0, heads * shape.chunks, 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) work(i / shape.chunks, i % shape.chunks);
          });
        };
        pieces(rows_of);
        at::parallel_for(0, heads, 1, [&](int64_t begin, int64_t end) {
          for (int64_t bh = begin; bh < end; ++bh) prefix_of(bh);
        });
        pieces(keys_of);
      }
      if (weight.given) {
        const float* products = weight_grads.data_ptr<float>();
        float *pairs_data = d_pairs.data_ptr<float>(), *prefix_data = d_prefix.data_ptr<float>(),
              *self_data = d_self.data_ptr<float>();
        at::parallel_for(0, shape.H, 1, [&](int64_t begin, int64_t end) {
          for (int64_t h = begin; h < end; ++h) {
            for (int64_t c = 0; c < shape.columns(h) - prefix; ++c) {
              const int64_t offset = shape.offsets[shape.first[h] + c];
              float* own = pairs_data + weight.begin[shape.first[h] + c];
              const int64_t from = std::max<int64_t>(0, -offset), to = std::min(shape.N, shape.N - offset);
              for (int64_t b = 0; b < shape.B; ++b) {
                for (int64_t j = from; j < to; ++j) {
                  own[lower(j, offset)] += products[shape.at(b, h, j / L) + L * (prefix + c) + j % L];
                }
              }
            }
            for (int64_t b = 0; b < shape.B; ++b) {
              const float* sums_bh = sums_data + (b * shape.H + h) * shape.chunks * size;
              prefix_data[h] += sums_bh[size - 2];
              self_data[h] += sums_bh[size - 1];
            }
          }
        });
      }
    });
  });
  if (dq.size(3) != width) {
    dq = dq.narrow(3, 0, width);
    dk = dk.narrow(3, 0, width);
    dv = dv.narrow(3, 0, width);
  }
  return {dq, dk, dv, d_pairs, d_prefix, d_self};
}

TORCH_LIBRARY(hf_sparseprior, m) {
  m.def(
      "diagonal_forward(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor counts, int prefix, float scale, "
      "bool zero_fill, Tensor? pair_weights, Tensor? pair_begin, Tensor? prefix_weight, Tensor? self_weight, "
      "Tensor? drop, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "diagonal_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor offsets, Tensor counts, "
      "int prefix, float scale, bool zero_fill, Tensor? pair_weights, Tensor? pair_begin, Tensor? prefix_weight, "
      "Tensor? self_weight, Tensor? drop, Tensor probs, Tensor logits, Tensor floors, Tensor rows) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(hf_sparseprior, CPU, m) {
  m.impl("diagonal_forward", forward);
  m.impl("diagonal_backward", backward);
}

}  // namespace

// Attention of each patch over a list of keys on CPUs, forward and backward. Pairs that are in no list are not
// computed.
//
//   out_j = sum over t in keys_j of softmax_t(scale * q_j . k_t * factor_j,t) v_t
//
// Prefix tokens see everything, with a factor of their own. All images share the lists, or each image has its own.
//
// Shapes: B batch, H heads, T = P + N tokens, P prefix tokens, D head width, K places of a list.
// A piece of work is some query rows of a head of one image forward, and a head backward, of all images if they share a
// factor. Nothing is added across pieces, so the result does not depend on the number of threads.

#include <atomic>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace sparseprior {
namespace {

struct Lists {
  int64_t B, H, P, N, T, D, K;
  int64_t size, places;  // floats of a packed row; places of the longest list in whole vectors
  float scale;
  const int32_t* keys;             // (1 or B, H, N, K)
  const float *factor, *prefix;    // (1 or B, H, N, K), (H)
  bool own_keys, own_factor;       // whether each image has its own

  explicit Lists(const ListedInputs& inputs)
      : B(inputs.B), H(inputs.H), P(inputs.P), N(inputs.T - inputs.P), T(inputs.T), D(inputs.q.width), K(inputs.K),
        size(packed_width(D)), places(packed_width(std::max(K, T * (int64_t)(P > 0)))), scale(inputs.scale),
        keys(inputs.keys), factor(inputs.factor), prefix(inputs.prefix_factor), own_keys(inputs.own_keys),
        own_factor(inputs.own_factor) {}
  // Images that one piece of work of the backward pass goes through.
  int64_t images() const { return factor && !own_factor ? std::max<int64_t>(B, 1) : 1; }
};

// The list of one row, with the factors of its logits.
struct Row {
  const int32_t* keys;  // nullptr: all
  const float* factor;  // nullptr: `same`
  float same;
  int64_t count;
};

Row row_of(const Lists& x, int64_t b, int64_t h, int64_t t) {
  if (t < x.P) return {nullptr, nullptr, x.prefix ? x.prefix[h] : 1.0f, x.T};
  const int64_t place = (h * x.N + t - x.P) * x.K;
  const int32_t* keys = x.keys + (x.own_keys ? b : 0) * x.H * x.N * x.K + place;
  const float* factor = x.factor ? x.factor + (x.own_factor ? b : 0) * x.H * x.N * x.K + place : nullptr;
  return {keys, factor, 1.0f, keys[x.K - 1] < 0 ? std::find(keys, keys + x.K, -1) - keys : x.K};
}

// Rows of a tensor of one head in whole registers, packed: rows of all heads lie so far from each other in memory that a
// cache, which places them by their address, would keep few of one head.
template <typename E>
class Rows {
 public:
  Rows(const View& x, int64_t b, int64_t h, int64_t tokens)
      : step_(packed_width(x.width)), copy_(tokens * step_ / Elements<E>::VECTORS), data_((E*)copy_.data()) {
    read_rows(x, b, h, 0, tokens, 0, tokens, (E*)copy_.data());
  }
  SPARSEPRIOR_INLINE const E* operator[](int64_t t) const { return data_ + t * step_; }

 private:
  int64_t step_;
  Buffer copy_;
  const E* data_;
};

SPARSEPRIOR_INLINE int64_t key(const Row& row, int64_t i) { return row.keys ? row.keys[i] : i; }

// out[i] = query . rows[key i] of 16 i, after `last` with its row; S vectors a row, 0 if that is not known at compile time.
template <int S, typename E>
SPARSEPRIOR_INLINE void products(
    const Row& row, int64_t i, int64_t last, const E* query, const Rows<E>& rows, int64_t size, float* out) {
  typedef Elements<E> Own;
  constexpr int64_t STEP = L * Own::VECTORS, COUNT = S ? S / Own::VECTORS : 1;
  typename Own::Register own[COUNT];
  for (int64_t e = 0; e < COUNT; ++e) own[e] = Own::read(query + STEP * e);
  vec x[L];
#pragma GCC unroll 16
  for (int64_t lane = 0; lane < L; ++lane) {
    const E* other = rows[key(row, std::min(i + lane, last))];
    x[lane] = Own::product(own[0], Own::read(other));
#pragma GCC unroll 4
    for (int64_t e = 1; e < COUNT; ++e) x[lane] = Own::dot(x[lane], own[e], Own::read(other + STEP * e));
    for (int64_t e = STEP; !S && e < size; e += STEP) {
      x[lane] = Own::dot(x[lane], Own::read(query + e), Own::read(other + e));
    }
  }
  store(out + i, sums(x));
}
template <int S, typename E>
void products(const Row& row, const E* query, const Rows<E>& rows, int64_t size, float* out) {
  int64_t i = 0;
  for (; i + L <= row.count; i += L) products<S>(row, i, i + L, query, rows, size, out);
  if (i < row.count) products<S>(row, i, row.count - 1, query, rows, size, out);
}
template <typename E>
void products(const Row& row, const E* query, const Rows<E>& rows, int64_t size, float* out) {
  switch (size / L) {
    case 2: return products<2>(row, query, rows, size, out);
    case 4: return products<4>(row, query, rows, size, out);
    default: return products<0>(row, query, rows, size, out);
  }
}

// S vectors of out = sum of share[i] * rows[key i].
template <int S, typename E>
SPARSEPRIOR_INLINE void mixture(const Row& row, const float* share, const Rows<E>& rows, int64_t first, float* out) {
  typedef Elements<E> Own;
  constexpr int STEP = Own::VECTORS;
  vec even[S], odd[S];  // the terms of even and of odd i
  for (int s = 0; s < S; ++s) even[s] = odd[s] = vec{};
  int64_t i = 0;
  for (; i + 2 <= row.count; i += 2) {
    const E *a = rows[key(row, i)] + first, *b = rows[key(row, i + 1)] + first;
#pragma GCC unroll 4
    for (int s = 0; s < S; s += STEP) {
      Own::add(even + s, share[i], Own::read(a + L * s));
      Own::add(odd + s, share[i + 1], Own::read(b + L * s));
    }
  }
  if (i < row.count) {
    const E* a = rows[key(row, i)] + first;
    for (int s = 0; s < S; s += STEP) Own::add(even + s, share[i], Own::read(a + L * s));
  }
  for (int s = 0; s < S; s += STEP) {
    for (int own = s; own < s + STEP; ++own) even[own] += odd[own];
    Own::in_order(even + s);
    for (int own = s; own < s + STEP; ++own) store(out + first + L * own, even[own]);
  }
}
template <typename E>
void mixture(const Row& row, const float* share, const Rows<E>& rows, int64_t size, float* out) {
  constexpr int ONE = Elements<E>::VECTORS;
  int64_t first = 0;
  for (; first + 4 * L <= size; first += 4 * L) mixture<4>(row, share, rows, first, out);
  for (; first < size; first += L * ONE) mixture<ONE>(row, share, rows, first, out);
}

// S registers of out = sum of share[i] * rows[key i], two keys at a time, where the processor multiplies pairs of bfloat16:
// words have neighbouring shares, and one element of two rows.
#if defined(__AVX512BF16__)
template <int S>
SPARSEPRIOR_INLINE void mixture_of_pairs(const Row& row, const Half* share, const Rows<Half>& rows, int64_t first, float* out) {
  typedef Elements<Half> Own;
  vec low[S], high[S];  // elements 8 i..8 i + 3 and 8 i + 4..8 i + 7 of a register
  for (int s = 0; s < S; ++s) low[s] = high[s] = vec{};
  for (int64_t i = 0; i < row.count; i += 2) {
    const Half *a = rows[key(row, i)] + first, *b = i + 1 < row.count ? rows[key(row, i + 1)] + first : nullptr;
    const Own::Register factor = Own::all((const float*)(share + i));
#pragma GCC unroll 2
    for (int s = 0; s < S; ++s) {
      const __m512i x = (__m512i)Own::read(a + 2 * L * s), y = b ? (__m512i)Own::read(b + 2 * L * s) : __m512i{};
      low[s] = Own::dot(low[s], factor, (Own::Register)_mm512_unpacklo_epi16(x, y));
      high[s] = Own::dot(high[s], factor, (Own::Register)_mm512_unpackhi_epi16(x, y));
    }
  }
  for (int s = 0; s < S; ++s) {
    float* to = out + first + 2 * L * s;
    store(to, SPARSEPRIOR_SHUFFLE(low[s], high[s], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
    store(to + L, SPARSEPRIOR_SHUFFLE(low[s], high[s], 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
  }
}
// `share` is rounded in place.
void mixture_of_pairs(const Row& row, float* share, const Rows<Half>& rows, int64_t size, float* out) {
  Half* rounded = (Half*)share;
  for (int64_t i = 0; i < row.count; i += L) store(rounded + i, load(share + i));
  int64_t first = 0;
  for (; first + 4 * L <= size; first += 4 * L) mixture_of_pairs<2>(row, rounded, rows, first, out);
  for (; first < size; first += 2 * L) mixture_of_pairs<1>(row, rounded, rows, first, out);
}
#else
inline void mixture_of_pairs(const Row&, float*, const Rows<Half>&, int64_t, float*) {}
#endif

// Adds share[i] * value to rows[key i].
void spread(const Row& row, const float* share, const float* value, int64_t size, float* rows) {
  for (int64_t i = 0; i < row.count; ++i) {
    float* to = rows + key(row, i) * size;
    for (int64_t e = 0; e < size; e += L) store(to + e, load(to + e) + share[i] * load(value + e));
  }
}

SPARSEPRIOR_INLINE vec factors(const Row& row, int64_t i) {
  return row.factor ? load_lanes(row.factor + i, 0, row.count - i) : splat(row.same);
}

// Logits of a row from its products, -inf after the last key; gives the largest. See `row_logits` in decayed_cpu.cpp.
float row_logits(const Row& row, float scale, const float* products, float* logits) {
  vec highest = splat(MINUS_INF);
  for (int64_t i = 0; i < row.count; i += L) {
    const vec logit = load(products + i) * scale * factors(row, i);
    const vec value = lanes(0, row.count - i) ? logit : splat(MINUS_INF);
    store(logits + i, value);
    highest = maximum(highest, value);
  }
  return maximum(highest);
}

// Products become exp(logit - largest); gives 1 / sum.
float softmax(const Row& row, float scale, float* scores) {
  const float top = row_logits(row, scale, scores, scores);
  vec total = vec{};
  for (int64_t i = 0; i < row.count; i += L) {
    const vec value = lanes(0, row.count - i) ? exp_of(load(scores + i) - top) : vec{};
    store(scores + i, value);
    total += value;
  }
  return 1.0f / sum(total);
}

constexpr int64_t BLOCK = 64;  // query rows that are read and written together

template <typename E>
void forward_rows(
    const Lists& x, int64_t b, int64_t h, int64_t first, int64_t last, const View& q, const View& k, const View& v,
    const View& out) {
  const Rows<E> keys(k, b, h, x.T), values(v, b, h, x.T);
  const Buffer queries(BLOCK * x.size), results(BLOCK * x.size), scores(x.places);
  for (int64_t t0 = first; t0 < last; t0 += BLOCK) {
    const int64_t count = std::min(BLOCK, last - t0);
    read_rows(q, b, h, t0, t0 + count, 0, x.T, (E*)queries.data());
    for (int64_t r = 0; r < count; ++r) {
      const Row row = row_of(x, b, h, t0 + r);
      float* result = results.data() + r * x.size;
      products(row, (const E*)queries.data() + r * x.size, keys, x.size, scores.data());
      const float share = softmax(row, x.scale, scores.data());
      if constexpr (HALF_PRODUCTS && std::is_same_v<E, Half>) {
        mixture_of_pairs(row, scores.data(), values, x.size, result);
      } else {
        mixture(row, scores.data(), values, x.size, result);
      }
      for (int64_t e = 0; e < x.size; e += L) store(result + e, load(result + e) * share);
    }
    write_rows(results.data(), out, b, h, t0, count);
  }
}

struct Gradients {
  View q, k, v, grad, dq, dk, dv;
  float *factor, *prefix;  // (1 or B, H, N, K), (B, H); nullptr if they are not wanted
};

// `p`: products, which become probabilities. `ds`: their gradients, which become those of the products. `e`: memory for a
// row. As in decayed_cpu.cpp the mean of the gradients comes from the row itself.
void row_gradients(const Row& row, float scale, float* p, float* ds, float* e, float* d_factor, float* d_same) {
  const float top = row_logits(row, scale, p, e);
  vec total = vec{}, weighted = vec{};
  for (int64_t i = 0; i < row.count; i += L) {
    const vec value = lanes(0, row.count - i) ? exp_of(load(e + i) - top) : vec{};
    store(e + i, value);
    total += value;
    weighted += value * load(ds + i);
  }
  const float sum_of = sum(total), mean = sum(weighted) / sum_of, share = 1.0f / sum_of;
  vec same = vec{};
  for (int64_t i = 0; i < row.count; i += L) {
    const vec factor = factors(row, i), product = load(p + i) * scale;
    const vec value = load(e + i) * share, d = lanes(0, row.count - i) ? value * (load(ds + i) - mean) : vec{};
    if (d_factor && row.factor) {
      const int64_t count = std::min<int64_t>(L, row.count - i);
      store_lanes(d_factor + i, load_lanes(d_factor + i, 0, count) + d * product, count);
    } else {
      same += d * product;
    }
    store(ds + i, d * factor * scale);
    store(p + i, value);
  }
  *d_same += sum(same);
}

template <typename E>
void backward_head(const Lists& x, int64_t b, int64_t h, const Gradients& g) {
  const Rows<E> keys(g.k, b, h, x.T), values(g.v, b, h, x.T);
  constexpr bool HALVES = std::is_same_v<E, Half>;
  const Buffer query(x.size), grad(x.size), halves(x.size), result(x.size), p(x.places), ds(x.places), e(x.places),
      dk(x.T * x.size), dv(x.T * x.size);
  E *own_query = (E*)(HALVES ? halves : query).data(), *own_grad = HALVES ? own_query + x.size : (E*)grad.data();
  std::fill_n(dk.data(), x.T * x.size, 0.0f);
  std::fill_n(dv.data(), x.T * x.size, 0.0f);
  float prefix_sum = 0.0f, unused = 0.0f;
  for (int64_t t = 0; t < x.T; ++t) {
    const Row row = row_of(x, b, h, t);
    read_rows(g.q, b, h, t, t + 1, 0, x.T, query.data());
    read_rows(g.grad, b, h, t, t + 1, 0, x.T, grad.data());
    if constexpr (HALVES) {
      read_rows(g.q, b, h, t, t + 1, 0, x.T, own_query);
      read_rows(g.grad, b, h, t, t + 1, 0, x.T, own_grad);
    }
    products(row, own_query, keys, x.size, p.data());
    products(row, own_grad, values, x.size, ds.data());
    float* d_factor = nullptr;
    if (g.factor && t >= x.P) d_factor = g.factor + (((x.own_factor ? b : 0) * x.H + h) * x.N + t - x.P) * x.K;
    row_gradients(row, x.scale, p.data(), ds.data(), e.data(), d_factor, t < x.P ? &prefix_sum : &unused);
    mixture(row, ds.data(), keys, x.size, result.data());
    write_rows(result.data(), g.dq, b, h, t, 1);
    spread(row, ds.data(), query.data(), x.size, dk.data());
    spread(row, p.data(), grad.data(), x.size, dv.data());
  }
  write_rows(dk.data(), g.dk, b, h, 0, x.T);
  write_rows(dv.data(), g.dv, b, h, 0, x.T);
  if (g.prefix) g.prefix[b * x.H + h] = prefix_sum;
}

template <typename F>
void for_heads(const Lists& x, const F& run) {
  const int64_t images = x.images(), pieces = x.H * (x.B / images);
  parallel_for(pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b0 = i / x.H * images;
      for (int64_t b = b0; b < b0 + images; ++b) run(b, i % x.H);
    }
  });
}

}  // namespace

bool listed_keys_fit(const int32_t* keys, int64_t rows, int64_t K, int64_t T) {
  constexpr int64_t GRAIN = 1 << 15;  // keys
  std::atomic<bool> fit(true);
  parallel_for(rows, GRAIN / K + 1, [&](int64_t begin, int64_t end) {
    uint32_t most = 0;  // of key + 1: a negative one is large
    for (int64_t i = begin * K; i < end * K; ++i) most = std::max(most, (uint32_t)keys[i] + 1);
    int32_t least = 0;
    for (int64_t row = begin; row < end; ++row) least = std::min(least, keys[row * K]);
    if ((int64_t)most > T || least < 0) fit = false;
  });
  return fit;
}

void listed_forward(const ListedInputs& inputs, const View& out) {
  const Lists x(inputs);
  const View &q = inputs.q, &k = inputs.k, &v = inputs.v;
  const bool halves = whole_registers<Half>(q) && whole_registers<Half>(k) && whole_registers<Half>(v);
  const auto run = halves ? forward_rows<Half> : forward_rows<float>;
  const int64_t packing = x.T / x.K + 1, parts = parts_for_threads(x.B * x.H, x.T, BLOCK, packing),
                rows = rows_of_part(x.T, BLOCK, parts);
  parallel_for(x.B * x.H * parts, 1, [&](int64_t begin, int64_t end) {  // images of a head share lists, and follow it
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = std::min(x.T, i % parts * rows), last = std::min(x.T, first + rows);
      run(x, i / parts % x.B, i / parts / x.B, first, last, q, k, v, out);
    }
  });
}

void listed_backward(const ListedInputs& inputs, const ListedGradients& f) {
  const Lists x(inputs);
  const Gradients g{inputs.q, inputs.k, inputs.v, f.grad, f.dq, f.dk, f.dv, f.factor, f.prefix};
  const std::initializer_list<const View*> seen = {&g.q, &g.k, &g.v, &g.grad};
  const bool halves = std::all_of(seen.begin(), seen.end(), [](const View* x) { return whole_registers<Half>(*x); });
  const auto run = halves ? backward_head<Half> : backward_head<float>;
  for_heads(x, [&](int64_t b, int64_t h) { run(x, b, h, g); });
}

}  // namespace sparseprior

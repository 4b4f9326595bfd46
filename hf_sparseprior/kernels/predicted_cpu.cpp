// The keys that Sparsifiner predicts, on CPUs: the `budget` largest scores of each patch, without a table of all pairs.
//
//   score_jk = sum over r of c_jr w_rk, where c_jr is above a threshold;  keys_j = those of the largest that are not 0
//
// The first of equal scores are taken. Rows are done one at a time and never leave the cache: few coefficients are
// above the threshold, and counting finds a bound between the scores that are kept and the others.
//
// The coefficients are a softmax over R summaries of the keys, c_j = softmax over r of scale * q_j . (sum over t of
// w_down_rt k_t).
//
// Shapes: B batch, H heads, N patches, R rows of the basis, P prefix tokens, D head width.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "vectors.h"

namespace sparseprior {
namespace {

constexpr int32_t NONE = std::numeric_limits<int32_t>::min();  // below every score

SPARSEPRIOR_INLINE veci load(const int32_t* p) {
  veci x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
SPARSEPRIOR_INLINE void store(int32_t* p, veci x) { std::memcpy(p, &x, sizeof x); }
SPARSEPRIOR_INLINE veci splat(int32_t x) { return veci{} + x; }

// How many of 16 integers are at least `bound`. `append` writes their places; `first` is the place of the first of the
// 16.
#if defined(__AVX512F__)
SPARSEPRIOR_INLINE int at_least(const int32_t* p, int32_t bound) {
  return __builtin_popcount(_mm512_cmpge_epi32_mask(_mm512_loadu_si512(p), _mm512_set1_epi32(bound)));
}
SPARSEPRIOR_INLINE int append(const int32_t* p, int32_t bound, int32_t first, int32_t* found) {
  const __mmask16 mask = _mm512_cmpge_epi32_mask(_mm512_loadu_si512(p), _mm512_set1_epi32(bound));
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_si512(found, _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(lanes, _mm512_set1_epi32(first))));
  return __builtin_popcount(mask);
}
#else
SPARSEPRIOR_INLINE int at_least(const int32_t* p, int32_t bound) {
  int count = 0;
  for (int lane = 0; lane < L; ++lane) count += p[lane] >= bound;
  return count;
}
SPARSEPRIOR_INLINE int append(const int32_t* p, int32_t bound, int32_t first, int32_t* found) {
  int count = 0;
  for (int lane = 0; lane < L; ++lane) {
    found[count] = first + lane;
    count += p[lane] >= bound;
  }
  return count;
}
#endif

// The numbers of a row that a thread works with. `size` is N in whole vectors.
struct Row {
  int64_t N, size;
  std::vector<int32_t> order, found;
  std::vector<int64_t> active;

  Row(int64_t N_, int64_t R)
      : N(N_), size(packed_width(N_)), order(size), found(size + L), active(R + 1) {}

  // The scores c W of the coefficients above the threshold, as integers in their order; NONE for 0, for NaN and after
  // the end of the row. `basis` has rows of `size`. Returns how many are not NONE.
  int64_t score(const float* c, const float* basis, int64_t R, float threshold) {
    int64_t used = 0;
    for (int64_t r = 0; r < R; ++r) {  // which ones cannot be foreseen, so no branch
      active[used] = r;
      used += c[r] > threshold;
    }
    veci count{};
    int64_t i = 0;
    for (; i + 4 * L <= size; i += 4 * L) count += tile<4>(i, c, basis, used);
    for (; i < size; i += L) count += tile<1>(i, c, basis, used);
    return sum(count);
  }
  template <int V>
  SPARSEPRIOR_INLINE veci tile(int64_t i, const float* c, const float* basis, int64_t used) {
    vec x[V];
    for (int s = 0; s < V; ++s) x[s] = vec{};
    for (int64_t n = 0; n < used; ++n) {
      const float* row = basis + active[n] * size + i;
      const vec factor = sparseprior::splat(c[active[n]]);
#pragma GCC unroll 4
      for (int s = 0; s < V; ++s) x[s] += factor * sparseprior::load(row + L * s);
    }
    veci count{};
#pragma GCC unroll 4
    for (int s = 0; s < V; ++s) {
      veci bits;
      std::memcpy(&bits, &x[s], sizeof bits);
      bits ^= (bits >> 31) & splat(0x7FFFFFFF);
      const veci there = (veci)(x[s] < sparseprior::splat(0.0f)) | (veci)(x[s] > sparseprior::splat(0.0f));
      store(&order[i + L * s], (bits & there) | (splat(NONE) & ~there));
      count -= there;
    }
    return count;
  }

  static int64_t sum(veci x) {
    int64_t total = 0;
    for (int lane = 0; lane < L; ++lane) total += x[lane];
    return total;
  }

  int64_t count_from(int32_t least) const {
    int64_t count = 0;
    for (int64_t i = 0; i < size; i += L) count += at_least(&order[i], least);
    return count;
  }

  // A bound that the `budget` largest of `there` reach, and others only if they are equal to the smallest of these.
  //
  // Between two bounds that too many and too few reach, the next one is where it would be if scores were spread evenly
  // there, every third time in the middle. For the fourth part of 196 that takes some five counts, halving some twelve.
  int32_t least_kept(int64_t there, int64_t budget) const {
    veci low = splat(std::numeric_limits<int32_t>::max()), high = splat(NONE);
    for (int64_t i = 0; i < size; i += L) {
      const veci x = load(&order[i]);
      high = x > high ? x : high;
      const veci y = x == splat(NONE) ? low : x;
      low = y < low ? y : low;
    }
    int64_t many = std::numeric_limits<int32_t>::max(), few = NONE;
    for (int lane = 0; lane < L; ++lane) {
      many = std::min<int64_t>(many, low[lane]);
      few = std::max<int64_t>(few, high[lane]);
    }
    ++few;
    int64_t reach_many = there, reach_few = 0;
    for (int step = 1; few - many > 1; ++step) {
      const double share = step % 3 ? (double)(reach_many - budget) / (double)(reach_many - reach_few) : 0.5;
      const int64_t next = std::clamp(many + (int64_t)(share * (double)(few - many)), many + 1, few - 1);
      const int64_t reach = count_from((int32_t)next);
      if (reach == budget) return (int32_t)next;
      if (reach > budget) {
        many = next;
        reach_many = reach;
      } else {
        few = next;
        reach_few = reach;
      }
    }
    return (int32_t)many;
  }

  // The places of the largest scores into `found`, in ascending order; returns how many there are. Of the `budget`
  // largest those that are 0 are left out, so a score below 0 comes in only where scores above 0 and zeros are fewer.
  int64_t select(int64_t there, int64_t budget) {
    if (there < N) budget = std::max(std::min(count_from(1), budget), budget - (N - there));
    if (!budget) return 0;
    const int32_t least = there <= budget ? NONE + 1 : least_kept(there, budget);
    int64_t count = 0;
    for (int64_t i = 0; i < size; i += L) count += append(&order[i], least, (int32_t)i, &found[count]);
    if (count <= budget) return count;
    // Too many are equal to the smallest one: the later ones are dropped.
    int64_t equal = budget - count_from(least + 1), kept = 0;
    for (int64_t i = 0; i < count; ++i)
      if (order[found[i]] > least || equal-- > 0) found[kept++] = found[i];
    return kept;
  }
};

// Rows r0..r0 + ROWS of W_down K, V vectors of each from element i on; `keys` are N packed rows.
template <int ROWS, int V>
SPARSEPRIOR_INLINE void summarise(
    const float* down, const float* keys, int64_t N, int64_t size, int64_t i, float* out) {
  vec x[ROWS][V];
  for (int r = 0; r < ROWS; ++r) {
    for (int s = 0; s < V; ++s) x[r][s] = vec{};
  }
  for (int64_t t = 0; t < N; ++t) {
    const float* key = keys + t * size + i;
#pragma GCC unroll 4
    for (int s = 0; s < V; ++s) {
      const vec own = sparseprior::load(key + L * s);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) x[r][s] += down[r * N + t] * own;
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int s = 0; s < V; ++s) sparseprior::store(out + r * size + i + L * s, x[r][s]);
  }
}
template <int ROWS>
void summarise(const float* down, const float* keys, int64_t N, int64_t size, float* out) {
  int64_t i = 0;
  for (; i + 4 * L <= size; i += 4 * L) summarise<ROWS, 4>(down, keys, N, size, i, out);
  for (; i < size; i += L) summarise<ROWS, 1>(down, keys, N, size, i, out);
}

// Products of ROWS queries with V vectors of summaries; `summaries` (D, padded R).
template <int ROWS, int V>
SPARSEPRIOR_INLINE void logits_of(
    const float* queries, int64_t size, int64_t D, const float* summaries, int64_t padded, float scale, float* out) {
  vec x[ROWS][V];
  for (int j = 0; j < ROWS; ++j) {
    for (int s = 0; s < V; ++s) x[j][s] = vec{};
  }
  for (int64_t d = 0; d < D; ++d) {
#pragma GCC unroll 2
    for (int s = 0; s < V; ++s) {
      const vec own = sparseprior::load(summaries + d * padded + L * s);
#pragma GCC unroll 4
      for (int j = 0; j < ROWS; ++j) x[j][s] += queries[j * size + d] * own;
    }
  }
  for (int j = 0; j < ROWS; ++j) {
    for (int s = 0; s < V; ++s) sparseprior::store(out + j * padded + L * s, x[j][s] * scale);
  }
}

void coefficients_of_head(
    const CoefficientInputs& x, int64_t b, int64_t h, const Buffer& keys, const Buffer& queries, const Buffer& rows,
    const Buffer& summaries) {
  constexpr int64_t ROWS = 4;
  const int64_t N = x.T - x.P, D = x.q.width, size = packed_width(D), padded = packed_width(x.R);
  read_rows(x.k, b, h, x.P, x.T, x.P, x.T, keys.data());
  int64_t r = 0;
  for (; r + ROWS <= x.R; r += ROWS) summarise<ROWS>(x.down + r * N, keys.data(), N, size, rows.data() + r * size);
  for (; r < x.R; ++r) summarise<1>(x.down + r * N, keys.data(), N, size, rows.data() + r * size);
  float* turned = summaries.data();
  std::fill_n(turned, D * padded, 0.0f);
  for (r = 0; r < x.R; ++r) {
    for (int64_t d = 0; d < D; ++d) turned[d * padded + r] = rows.data()[r * size + d];
  }
  float* logits = rows.data();  // of ROWS rows, in the place of what has been turned
  for (int64_t j0 = 0; j0 < N; j0 += ROWS) {
    const int64_t count = std::min(ROWS, N - j0);
    read_rows(x.q, b, h, x.P + j0, x.P + j0 + ROWS, x.P, x.T, queries.data());
    r = 0;
    for (; r + 2 * L <= padded; r += 2 * L) {
      logits_of<ROWS, 2>(queries.data(), size, D, turned + r, padded, x.scale, logits + r);
    }
    for (; r < padded; r += L) logits_of<ROWS, 1>(queries.data(), size, D, turned + r, padded, x.scale, logits + r);
    for (int64_t j = 0; j < count; ++j) {
      float* own = logits + j * padded;
      vec top = sparseprior::splat(MINUS_INF), total = vec{};
      for (int64_t i = 0; i < x.R; i += L) {
        const vec value = lanes(0, x.R - i) ? sparseprior::load(own + i) : sparseprior::splat(MINUS_INF);
        top = sparseprior::maximum(top, value);
      }
      const float highest = sparseprior::maximum(top);
      for (int64_t i = 0; i < x.R; i += L) {
        const vec value = lanes(0, x.R - i) ? exp_of(sparseprior::load(own + i) - highest) : vec{};
        sparseprior::store(own + i, value);
        total += value;
      }
      const float share = 1.0f / sparseprior::sum(total);
      float* out = x.out + (((b * x.H + h) * N) + j0 + j) * x.R;
      for (int64_t i = 0; i < x.R; i += L) {
        store_lanes(out + i, sparseprior::load(own + i) * share, std::min<int64_t>(L, x.R - i));
      }
    }
  }
}

}  // namespace

void predicted_coefficients(const CoefficientInputs& x) {
  const int64_t size = packed_width(x.q.width), padded = packed_width(x.R);
  parallel_for(x.B * x.H, 1, [&](int64_t begin, int64_t end) {
    const Buffer keys((x.T - x.P) * size), queries(4 * size), rows(std::max(x.R * size, 4 * padded)),
        summaries(x.q.width * padded);
    for (int64_t i = begin; i < end; ++i) {
      coefficients_of_head(x, i / x.H, i % x.H, keys, queries, rows, summaries);
    }
  });
}

void predicted_keys(
    const float* coefficients, const float* basis, int64_t rows, int64_t N, int64_t R, int64_t prefix, int64_t budget,
    float threshold, int32_t* keys) {
  const int64_t places = prefix + budget;
  parallel_for(rows, 64, [&](int64_t begin, int64_t end) {
    Row row(N, R);
    for (int64_t j = begin; j < end; ++j) {
      const int64_t there = row.score(coefficients + j * R, basis, R, threshold);
      const int64_t count = row.select(there, budget);
      int32_t* own = keys + j * places;
      for (int64_t i = 0; i < prefix; ++i) own[i] = (int32_t)i;
      for (int64_t i = 0; i < count; ++i) own[prefix + i] = row.found[i] + (int32_t)prefix;
      for (int64_t i = prefix + count; i < places; ++i) own[i] = -1;
      if (!prefix && !count) own[0] = (int32_t)(j % N);
    }
  });
}

}  // namespace sparseprior

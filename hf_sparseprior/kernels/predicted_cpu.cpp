// The keys that Sparsifiner predicts, on CPUs: the `budget` largest scores of each patch, without a table of all pairs.
//
//   score_jk = sum over r of c_jr w_rk, where c_jr is above a threshold;  keys_j = the largest of them that are not 0
//
// The first of equal scores are taken. Rows are done one at a time and never leave the cache: few coefficients are
// above the threshold, and counting finds the smallest score that is kept, bit by bit.
//
// Shapes: B batch, H heads, N patches, R rows of the basis, P prefix tokens.

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
  std::vector<float> scores;
  std::vector<int32_t> order, found;

  explicit Row(int64_t N_)
      : N(N_), size(packed_width(N_)), scores(size), order(size), found(size + L) {}

  // scores = c W, of the coefficients above the threshold; `basis` has rows of `size`.
  void score(const float* c, const float* basis, int64_t R, float threshold) {
    std::fill(scores.begin(), scores.end(), 0.0f);
    for (int64_t r = 0; r < R; ++r) {
      if (!(c[r] > threshold)) continue;
      const float* row = basis + r * size;
      const vec factor = sparseprior::splat(c[r]);
      for (int64_t i = 0; i < size; i += L)
        sparseprior::store(&scores[i], sparseprior::load(&scores[i]) + factor * sparseprior::load(row + i));
    }
  }

  // Integers in the order of the scores; NONE for 0, for NaN and after the end of the row. Returns how many are not
  // NONE.
  int64_t rank() {
    veci count{};
    for (int64_t i = 0; i < size; i += L) {
      const vec x = sparseprior::load(&scores[i]);
      veci bits;
      std::memcpy(&bits, &x, sizeof bits);
      bits ^= (bits >> 31) & splat(0x7FFFFFFF);
      const veci there = (veci)(x < sparseprior::splat(0.0f)) | (veci)(x > sparseprior::splat(0.0f));
      store(&order[i], (bits & there) | (splat(NONE) & ~there));
      count -= there;
    }
    return sum(count);
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

  // The `budget`th largest, if more than that are not NONE. It may be smaller, if as many are above it.
  int32_t least_kept(int64_t budget) const {
    veci low = splat(std::numeric_limits<int32_t>::max()), high = splat(NONE);
    for (int64_t i = 0; i < size; i += L) {
      const veci x = load(&order[i]);
      high = x > high ? x : high;
      const veci y = x == splat(NONE) ? low : x;
      low = y < low ? y : low;
    }
    int32_t least = std::numeric_limits<int32_t>::max(), most = NONE;
    for (int lane = 0; lane < L; ++lane) {
      least = std::min(least, (int32_t)low[lane]);
      most = std::max(most, (int32_t)high[lane]);
    }
    // As unsigned numbers in the same order, whose common first bits are known.
    const uint32_t sign = 0x80000000u, first = (uint32_t)least ^ sign, last = (uint32_t)most ^ sign;
    if (first == last) return least;
    int bit = 31 - __builtin_clz(first ^ last);
    uint32_t bound = last & ~(uint32_t)((uint64_t(2) << bit) - 1);
    for (; bit >= 0; --bit) {
      const uint32_t next = bound | (1u << bit);
      const int64_t count = count_from((int32_t)(next ^ sign));
      if (count >= budget) bound = next;
      if (count == budget) break;
    }
    return (int32_t)(bound ^ sign);
  }

  // The places of the `budget` largest into `found`, in ascending order; returns how many there are.
  int64_t select(int64_t budget) {
    const int64_t there = rank();
    const int32_t least = there <= budget ? NONE + 1 : least_kept(budget);
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

}  // namespace

void predicted_keys(
    const float* coefficients, const float* basis, int64_t rows, int64_t N, int64_t R, int64_t prefix, int64_t budget,
    float threshold, int32_t* keys) {
  const int64_t places = prefix + budget;
  parallel_for(rows, 64, [&](int64_t begin, int64_t end) {
    Row row(N);
    for (int64_t j = begin; j < end; ++j) {
      row.score(coefficients + j * R, basis, R, threshold);
      const int64_t count = row.select(budget);
      int32_t* own = keys + j * places;
      for (int64_t i = 0; i < prefix; ++i) own[i] = (int32_t)i;
      for (int64_t i = 0; i < count; ++i) own[prefix + i] = row.found[i] + (int32_t)prefix;
      for (int64_t i = prefix + count; i < places; ++i) own[i] = -1;
      if (!prefix && !count) own[0] = (int32_t)(j % N);
    }
  });
}

}  // namespace sparseprior

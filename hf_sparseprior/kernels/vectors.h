// Vectors of 16 floats with GCC's and clang's vector extensions, which use the processor's instructions, and rows of
// tensors that are read into and written from packed float32.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

#include "kernels.h"

namespace sparseprior {

#define SPARSEPRIOR_INLINE inline __attribute__((always_inline))

constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();

typedef float vec __attribute__((vector_size(64)));
typedef int32_t veci __attribute__((vector_size(64)));
typedef uint16_t vech __attribute__((vector_size(32)));
typedef uint32_t vecu __attribute__((vector_size(64)));

#if defined(__clang__)
#define SPARSEPRIOR_SHUFFLE __builtin_shufflevector
#else
#define SPARSEPRIOR_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, veci{__VA_ARGS__})
#endif

SPARSEPRIOR_INLINE vec splat(float x) { return vec{} + x; }

SPARSEPRIOR_INLINE vec load(const float* p) {
  vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
SPARSEPRIOR_INLINE void store(float* p, vec x) { std::memcpy(p, &x, sizeof x); }

// Writes past the caches, for aligned memory that is not read again soon, because a store would first read it.
SPARSEPRIOR_INLINE void stream(float* p, vec x) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)x);
#elif defined(__AVX__)
  __m256 halves[2];
  std::memcpy(halves, &x, sizeof x);
  _mm256_stream_ps(p, halves[0]);
  _mm256_stream_ps(p + 8, halves[1]);
#else
  store(p, x);
#endif
}
// Makes what was streamed visible to other threads.
inline void finish_streams() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

SPARSEPRIOR_INLINE vec load(const Half* p) {
  vech half;
  std::memcpy(&half, p, sizeof half);
  const vecu bits = __builtin_convertvector(half, vecu) << 16;
  vec x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
// To nearest, ties to even.
SPARSEPRIOR_INLINE vech to_half(vec x) {
#if defined(__AVX512BF16__)
  return (vech)_mm512_cvtneps_pbh((__m512)x);
#else
  vecu bits;
  std::memcpy(&bits, &x, sizeof x);
  const vecu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vecu nan = (vecu)(x != x);
  return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), vech);
#endif
}
SPARSEPRIOR_INLINE void store(Half* p, vec x) {
  const vech half = to_half(x);
  std::memcpy(p, &half, sizeof half);
}
SPARSEPRIOR_INLINE void stream(Half* p, vec x) {
#if defined(__AVX__)
  const vech half = to_half(x);
  __m256i bits;
  std::memcpy(&bits, &half, sizeof half);
  _mm256_stream_si256((__m256i*)p, bits);
#else
  store(p, x);
#endif
}

// Whether the processor multiplies pairs of Half. Otherwise unpacking them takes longer than products of float32.
#if defined(__AVX512BF16__)
constexpr bool HALF_PRODUCTS = true;
#else
constexpr bool HALF_PRODUCTS = false;
#endif

// ---- a row's elements in whole registers ------------------------------------------------------------------------------

// A register of Half holds 32 of them. Its even and its odd elements are a vector each, for two instructions; a row's
// order comes back when it is stored.
template <typename E>
struct Elements;
template <>
struct Elements<float> {
  typedef vec Register;
  static constexpr int VECTORS = 1;  // of a register

  SPARSEPRIOR_INLINE static Register read(const float* p) { return load(p); }
  SPARSEPRIOR_INLINE static Register all(const float* word) { return splat(*word); }
  SPARSEPRIOR_INLINE static vec product(Register a, Register b) { return a * b; }
  SPARSEPRIOR_INLINE static vec dot(vec sum, Register a, Register b) { return sum + a * b; }
  SPARSEPRIOR_INLINE static void add(vec* x, float factor, Register a) { x[0] += factor * a; }
  SPARSEPRIOR_INLINE static void in_order(vec*) {}
  template <typename T>
  SPARSEPRIOR_INLINE static void write(T* p, const vec* x) { store(p, x[0]); }
  template <typename T>
  SPARSEPRIOR_INLINE static void write_past_cache(T* p, const vec* x) { stream(p, x[0]); }
};
template <>
struct Elements<Half> {
  typedef vecu Register;
  static constexpr int VECTORS = 2;

  SPARSEPRIOR_INLINE static Register read(const Half* p) {
    vecu x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  // The same two elements in each lane.
  SPARSEPRIOR_INLINE static Register all(const float* word) {
    uint32_t bits;
    std::memcpy(&bits, word, sizeof bits);
    return vecu{} + bits;
  }
  SPARSEPRIOR_INLINE static vec even(Register a) { return as_floats(a << 16); }
  SPARSEPRIOR_INLINE static vec odd(Register a) { return as_floats(a & 0xffff0000); }
  // Products of Half are exact in float32, in which they are added.
  SPARSEPRIOR_INLINE static vec dot(vec sum, Register a, Register b) {
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return sum + even(a) * even(b) + odd(a) * odd(b);
#endif
  }
  SPARSEPRIOR_INLINE static vec product(Register a, Register b) { return dot(vec{}, a, b); }
  SPARSEPRIOR_INLINE static void add(vec* x, float factor, Register a) {
    x[0] += factor * even(a);
    x[1] += factor * odd(a);
  }
  // Even and odd elements become the first and the last of the row.
  SPARSEPRIOR_INLINE static void in_order(vec* x) {
    const vec low = SPARSEPRIOR_SHUFFLE(x[0], x[1], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    x[1] = SPARSEPRIOR_SHUFFLE(x[0], x[1], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    x[0] = low;
  }
  // Lane i has element i of x[0], then that of x[1].
  SPARSEPRIOR_INLINE static Register rounded(const vec* x) {
#if defined(__AVX512BF16__)
    const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]);
    const __m512i by_turns = {
        0x0011000100100000, 0x0013000300120002, 0x0015000500140004, 0x0017000700160006,
        0x0019000900180008, 0x001b000b001a000a, 0x001d000d001c000c, 0x001f000f001e000e};
    return (Register)_mm512_permutexvar_epi16(by_turns, apart);
#else
    return __builtin_convertvector(to_half(x[0]), vecu) | __builtin_convertvector(to_half(x[1]), vecu) << 16;
#endif
  }
  SPARSEPRIOR_INLINE static void write(Half* p, const vec* x) {
    const Register own = rounded(x);
    std::memcpy(p, &own, sizeof own);
  }
  SPARSEPRIOR_INLINE static void write_past_cache(Half* p, const vec* x) {
    stream((float*)p, as_floats(rounded(x)));
  }
  // What is not a row yet stays apart.
  SPARSEPRIOR_INLINE static void write(float* p, const vec* x) {
    store(p, x[0]);
    store(p + L, x[1]);
  }
  SPARSEPRIOR_INLINE static void write_past_cache(float* p, const vec* x) { write(p, x); }

 private:
  SPARSEPRIOR_INLINE static vec as_floats(Register a) {
    vec x;
    std::memcpy(&x, &a, sizeof x);
    return x;
  }
};

// Whether the rows of a tensor are whole registers of this type.
template <typename E>
inline bool whole_registers(const View& view) {
  return view.lane == 1 && view.half == std::is_same_v<E, Half> && view.width % (L * Elements<E>::VECTORS) == 0;
}

// b if one of them is no number.
#if defined(__AVX512F__)
SPARSEPRIOR_INLINE vec maximum(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
SPARSEPRIOR_INLINE vec minimum(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#else
SPARSEPRIOR_INLINE vec maximum(vec a, vec b) { return a > b ? a : b; }
SPARSEPRIOR_INLINE vec minimum(vec a, vec b) { return a < b ? a : b; }
#endif

// Lanes at a distance of 8, 4, 2 and 1, round the end.
template <int DISTANCE>
SPARSEPRIOR_INLINE vec turned(vec x) {
  constexpr int D = DISTANCE;
  return SPARSEPRIOR_SHUFFLE(
      x, x, D % 16, (D + 1) % 16, (D + 2) % 16, (D + 3) % 16, (D + 4) % 16, (D + 5) % 16, (D + 6) % 16, (D + 7) % 16,
      (D + 8) % 16, (D + 9) % 16, (D + 10) % 16, (D + 11) % 16, (D + 12) % 16, (D + 13) % 16, (D + 14) % 16,
      (D + 15) % 16);
}
SPARSEPRIOR_INLINE float sum(vec x) {
  x += turned<8>(x);
  x += turned<4>(x);
  x += turned<2>(x);
  return x[0] + x[1];
}
inline float dot(const float* a, const float* b, int64_t size) {
  vec x = vec{};
  for (int64_t i = 0; i < size; i += L) x += load(a + i) * load(b + i);
  return sum(x);
}
SPARSEPRIOR_INLINE float maximum(vec x) {
  x = maximum(x, turned<8>(x));
  x = maximum(x, turned<4>(x));
  x = maximum(x, turned<2>(x));
  return std::max(x[0], x[1]);
}

// -1 in lanes from..to.
SPARSEPRIOR_INLINE veci lanes(int64_t from, int64_t to) {
  const veci lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (lane >= (int32_t)from) & (lane < (int32_t)to);
}
// p[i] in lanes from..to, 0 in the others, whose memory is not touched.
inline vec load_lanes(const float* p, int64_t from, int64_t to) {
  if (from <= 0 && to >= L) return load(p);
  vec x = vec{};
  for (int64_t i = std::max<int64_t>(from, 0); i < std::min<int64_t>(to, L); ++i) x[i] = p[i];
  return x;
}

// The first lanes of x.
inline void store_lanes(float* p, vec x, int64_t count) {
  if (count == L) return store(p, x);
  for (int64_t i = 0; i < count; ++i) p[i] = x[i];
}

// exp of values of at most 0 (and a little above); below -87 it is 0. Relative error below 2e-7.
SPARSEPRIOR_INLINE vec exp_of(vec x) {
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

// 2 to the power of values up to about 100; below -126 it is 2^-126, negligible next to a softmax's largest term; NaN
// stays. Relative error 1e-7: a polynomial of degree 6 with the smallest maximum of the relative error over -0.5..0.5.
SPARSEPRIOR_INLINE vec exp2_of(vec x) {
  x = x < splat(-126.0f) ? splat(-126.0f) : x;
  const vec shifted = x + 12583039.0f;  // adding 1.5 * 2^23 + 127 rounds to an integer with the exponent's bias
  veci exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent <<= 23;  // the rest of the shifted number is shifted out
  vec power;
  std::memcpy(&power, &exponent, sizeof power);
  const vec r = x - (shifted - 12583039.0f);
  vec y = splat(1.5345808e-4f);
  y = y * r + 1.3399931e-3f;
  y = y * r + 9.6184891e-3f;
  y = y * r + 5.5503286e-2f;
  y = y * r + 2.4022646e-1f;
  y = y * r + 6.9314718e-1f;
  y = y * r + 1.0f;
  return y * power;
}

// a's and b's blocks of 4 lanes: two of a, then two of b.
template <int I, int J>
SPARSEPRIOR_INLINE vec blocks(vec a, vec b) {
  return SPARSEPRIOR_SHUFFLE(
      a, b, 4 * I, 4 * I + 1, 4 * I + 2, 4 * I + 3, 4 * J, 4 * J + 1, 4 * J + 2, 4 * J + 3, 16 + 4 * I, 17 + 4 * I,
      18 + 4 * I, 19 + 4 * I, 16 + 4 * J, 17 + 4 * J, 18 + 4 * J, 19 + 4 * J);
}

// Within blocks of 4 lanes, where shuffles are cheapest: lanes of a and of b by turns, one or two at a time, from the
// first or the last half of each block.
SPARSEPRIOR_INLINE vec ones_low(vec a, vec b) {
  return SPARSEPRIOR_SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
SPARSEPRIOR_INLINE vec ones_high(vec a, vec b) {
  return SPARSEPRIOR_SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
SPARSEPRIOR_INLINE vec twos_low(vec a, vec b) {
  return SPARSEPRIOR_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
}
SPARSEPRIOR_INLINE vec twos_high(vec a, vec b) {
  return SPARSEPRIOR_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

// Sums of 16 vectors, with the sum of x[i] in lane i.
SPARSEPRIOR_INLINE vec sums(const vec x[L]) {
  vec pairs[8], fours[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const vec a = x[2 * i], b = x[2 * i + 1];
    pairs[i] = ones_low(a, b) + ones_high(a, b);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const vec a = pairs[2 * i], b = pairs[2 * i + 1];
    fours[i] = twos_low(a, b) + twos_high(a, b);
  }
  const vec low = blocks<0, 1>(fours[0], fours[1]) + blocks<2, 3>(fours[0], fours[1]);
  const vec high = blocks<0, 1>(fours[2], fours[3]) + blocks<2, 3>(fours[2], fours[3]);
  return blocks<0, 2>(low, high) + blocks<1, 3>(low, high);
}

// x[i][j] becomes x[j][i].
SPARSEPRIOR_INLINE void transpose(vec x[L]) {
  vec y[L], z[L];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // lanes of neighbouring rows side by side, then of four, within blocks of 4 lanes
    const vec a = x[2 * i], b = x[2 * i + 1];
    y[2 * i] = ones_low(a, b);
    y[2 * i + 1] = ones_high(a, b);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // z[4 g + e]: block k is element 4 k + e of rows 4 g..4 g + 3
    const vec a = y[i / 2 * 4 + i % 2], b = y[i / 2 * 4 + i % 2 + 2];
    z[i / 2 * 4 + i % 2 * 2] = twos_low(a, b);
    z[i / 2 * 4 + i % 2 * 2 + 1] = twos_high(a, b);
  }
#pragma GCC unroll 4
  for (int e = 0; e < 4; ++e) {  // blocks are transposed
    const vec low = blocks<0, 1>(z[e], z[4 + e]), high = blocks<0, 1>(z[8 + e], z[12 + e]);
    const vec low2 = blocks<2, 3>(z[e], z[4 + e]), high2 = blocks<2, 3>(z[8 + e], z[12 + e]);
    x[e] = blocks<0, 2>(low, high);
    x[4 + e] = blocks<1, 3>(low, high);
    x[8 + e] = blocks<0, 2>(low2, high2);
    x[12 + e] = blocks<1, 3>(low2, high2);
  }
}

// A thread's memory for buffers, which is kept from call to call. The allocator would give a worker's freed memory back
// to the system, and touching new pages costs more than the work on them.
struct Slab {
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int64_t LIMIT = 0;  // each buffer has bounds of its own
#else
  static constexpr int64_t LIMIT = 32 << 20;  // largest number of bytes that a thread keeps
#endif
  char* data = nullptr;
  int64_t capacity = 0, in_slab = 0, in_use = 0, peak = 0;
  ~Slab() { release(); }
  void release() { ::operator delete(data, std::align_val_t(64)); }
  void grow() {
    release();
    capacity = std::min(peak, LIMIT);
    data = (char*)::operator new(capacity, std::align_val_t(64));
  }
};
inline Slab& slab() {
  thread_local Slab own;
  return own;
}

// Uninitialised floats on a cache line, for as long as a scope.
class Buffer {
 public:
  explicit Buffer(int64_t size) : bytes_((std::max<int64_t>(size, 1) * (int64_t)sizeof(float) + 63) / 64 * 64) {
    Slab& own = slab();
    if (!own.in_use && own.capacity < std::min(own.peak, Slab::LIMIT)) own.grow();
    own.in_use += bytes_;
    own.peak = std::max(own.peak, own.in_use);
    in_slab_ = own.in_slab + bytes_ <= own.capacity;
    data_ = in_slab_ ? (float*)(own.data + own.in_slab) : (float*)::operator new(bytes_, std::align_val_t(64));
    if (in_slab_) own.in_slab += bytes_;
  }
  ~Buffer() {
    Slab& own = slab();
    own.in_use -= bytes_;
    if (in_slab_) {
      own.in_slab -= bytes_;  // buffers end in the reverse order of their beginnings
    } else {
      ::operator delete(data_, std::align_val_t(64));
    }
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  float* data() const { return data_; }

 private:
  int64_t bytes_;
  bool in_slab_;
  float* data_;
};

template <typename T>
inline void read_row(const T* from, int64_t lane, int64_t width, float* to) {
  int64_t i = 0;
  if (lane == 1) {
    for (; i + L <= width; i += L) store(to + i, load(from + i));
  }
  for (; i < width; ++i) to[i] = (float)from[i * lane];
  for (; i % L; ++i) to[i] = 0.0f;
}

template <typename T>
inline void write_row(const float* from, int64_t lane, int64_t width, T* to) {
  int64_t i = 0;
  if (lane == 1) {
    for (; i + L <= width; i += L) store(to + i, load(from + i));
  }
  for (; i < width; ++i) to[i * lane] = (T)from[i];
}

// Tokens first..last as packed rows of whole vectors; tokens outside low..high are zeros.
inline void read_rows(
    const View& x, int64_t b, int64_t h, int64_t first, int64_t last, int64_t low, int64_t high, float* to) {
  const int64_t size = L * vectors(x.width);
  const int64_t begin = std::clamp(low, first, last), end = std::clamp(high, begin, last);
  std::memset(to, 0, (begin - first) * size * sizeof(float));
  for (int64_t t = begin; t < end; ++t) {
    float* row = to + (t - first) * size;
    if (x.half) {
      read_row(x.of<Half>(b, h, t), x.lane, x.width, row);
    } else {
      read_row(x.of<float>(b, h, t), x.lane, x.width, row);
    }
  }
  std::memset(to + (end - first) * size, 0, (last - end) * size * sizeof(float));
}

// The same of Half whose elements are neighbours, as they are.
inline void read_rows(
    const View& x, int64_t b, int64_t h, int64_t first, int64_t last, int64_t low, int64_t high, Half* to) {
  const int64_t begin = std::clamp(low, first, last), end = std::clamp(high, begin, last);
  std::fill_n(to, (begin - first) * x.width, Half{});
  for (int64_t t = begin; t < end; ++t) std::copy_n(x.of<Half>(b, h, t), x.width, to + (t - first) * x.width);
  std::fill_n(to + (end - first) * x.width, (last - end) * x.width, Half{});
}

inline void write_rows(const float* from, const View& x, int64_t b, int64_t h, int64_t first, int64_t count) {
  const int64_t size = L * vectors(x.width);
  for (int64_t r = 0; r < count; ++r) {
    if (x.half) {
      write_row(from + r * size, x.lane, x.width, x.of<Half>(b, h, first + r));
    } else {
      write_row(from + r * size, x.lane, x.width, x.of<float>(b, h, first + r));
    }
  }
}

}  // namespace sparseprior

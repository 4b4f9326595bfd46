// Attention along diagonals on CPUs, forward and backward, without an N x N array.
//
// Patch token j of head h sees the prefix tokens and the patches j + o, with o in the head's signed offsets. Prefix
// tokens see everything. A patch that would see nothing sees itself; if there are such patches, the head has a last
// offset 0.
//
// A piece of work is some rows of a head, in blocks of 16. The dot products of a block with one offset's keys are one
// vector, in which softmax runs. Pieces follow one another in the order of memory: all heads of some rows, then the
// next rows. So keys and values are still in the second cache when the last row that sees them comes. Rows of whole
// float32 vectors are read in place; others are packed in float32, once a piece. Rows that do not exist are zeros, so
// that the loops need no case for the edges.
//
// Shapes: B batch, H heads, T = P + N tokens, P prefix tokens, D head width, C_h columns of head h: its prefix keys, its
// offsets, and without prefix tokens one more for the patches themselves. Per-pair arrays: head after head (b, column,
// row), rows padded to whole blocks of 16.
//
// Sums over pieces are taken in the order of the pieces, so the result does not depend on the number of threads.

#include <type_traits>
#include <vector>

#include "vectors.h"

namespace sparseprior {
namespace {

// Rows of a piece, in whole blocks. Packing repeats the rows that two pieces see; reading in place repeats nothing.
constexpr int64_t PACKED_CHUNK = 256, CHUNK = 128;
constexpr int64_t LARGE_BYTES = 2 << 20;  // bytes of one of q, k, v, out

// Whether rows of this type are read in place. At a distance of whole pages all of them would use the same sets of a
// cache.
template <typename E>
inline bool in_place(const View& view) {
  return whole_registers<E>(view) && view.token * (int64_t)sizeof(E) % 4096 != 0;
}

// Rows of a block that have a key in a column.
struct Span {
  int64_t from, to;
  bool all() const { return from == 0 && to == L; }
  veci mask() const { return lanes(from, to); }
};

// What all pieces of a head have in common.
struct Head {
  std::vector<int64_t> offsets;  // signed
  int64_t count = 0;             // number of offsets
  int64_t columns = 0;           // columns that are in use
  int64_t first = 0;             // index of the first offset in the operator's tables
  int64_t start = 0;             // columns of the heads before
  int64_t self_from = 0, self_to = 0;  // rows that see only themselves, by the last offset
  // Rows that a piece needs, relative to its first row, as ranges that do not touch.
  std::vector<std::pair<int64_t, int64_t>> ranges;
  int64_t packed = 0;              // rows in all ranges
  int64_t own = 0;                 // the piece's first row among the packed rows, if it is one of them
  std::vector<int64_t> ahead, behind;  // the same of the rows at +offset and -offset

  bool is_self(int64_t c) const { return self_from < self_to && c == count - 1; }
  // The head for `rows` rows from j0 on.
  Span valid(int64_t c, int64_t j0, int64_t rows, int64_t N) const {
    int64_t from = std::max<int64_t>(0, -offsets[c] - j0), to = std::min(rows, N - offsets[c] - j0);
    if (is_self(c)) {
      from = std::max(from, self_from - j0);
      to = std::min(to, self_to - j0);
    }
    return {from, std::max(from, to)};
  }
};

}  // namespace

struct DiagonalProblem {
  int64_t B, H, P, N, D, size;  // size: floats of a packed row
  int64_t padded, chunk, chunks, rows;  // rows in whole blocks; rows of a piece; pieces of a head; rows of the largest
  int64_t columns = 0, most_packed = 0, most_columns = 0, farthest = 0;  // farthest: the largest offset
  float scale;
  bool zero_fill, decayed;
  bool large;  // the tensors do not stay in a cache from one call to the next
  // Weights of pairs (decay): for offsets W[begin + lower row], one number a head for pairs with prefix
  // tokens and for patches with themselves only.
  const float *pair_weights = nullptr, *prefix_weights = nullptr, *self_weights = nullptr;
  const int64_t* begin = nullptr;
  std::vector<Head> heads;
  std::vector<float> zeros;  // a row, of either type

  explicit DiagonalProblem(const DiagonalInputs& inputs)
      : B(inputs.B), H(inputs.H), P(inputs.P), N(inputs.T - inputs.P), D(inputs.q.width),
        size(packed_width(inputs.q.width)), scale(inputs.scale), zero_fill(inputs.zero_fill),
        decayed(inputs.decayed), pair_weights(inputs.pair_weights),
        prefix_weights(inputs.prefix_weights), self_weights(inputs.self_weights), begin(inputs.pair_begin), zeros(size) {
    padded = packed_width(N);
    large = B * H * (P + N) * size * (int64_t)sizeof(float) > LARGE_BYTES;
    chunk = in_place<float>(inputs.q) || in_place<Half>(inputs.q) ? CHUNK : PACKED_CHUNK;
    rows = std::min(chunk, padded);
    chunks = (N + chunk - 1) / chunk;
    const int32_t *count = inputs.counts, *signed_offsets = inputs.offsets;
    heads.resize(H);
    int64_t first = 0;
    for (int64_t h = 0; h < H; ++h) {
      Head& head = heads[h];
      head.offsets.assign(signed_offsets + first, signed_offsets + first + count[h]);
      head.first = first;
      head.start = columns;
      int64_t smallest = N;
      for (const int64_t offset : head.offsets) {
        smallest = std::min(smallest, std::abs(offset));
        farthest = std::max(farthest, std::abs(offset));
      }
      if (!P && 2 * smallest > N) {  // rows nearer to both ends than the smallest offset
        head.self_from = N - smallest;
        head.self_to = smallest;
        head.offsets.push_back(0);
      }
      head.count = (int64_t)head.offsets.size();
      head.columns = P + head.count;
      place(head);
      first += count[h];
      columns += P + count[h] + (P ? 0 : 1);
      most_packed = std::max({most_packed, head.packed, L * (head.count + 1)});
      most_columns = std::max(most_columns, head.columns);
    }
  }

  void place(Head& head) const {
    std::vector<int64_t> shifts;
    if (P) shifts.push_back(0);  // the rows themselves as keys of the prefix tokens
    for (int64_t c = 0; c < head.count; ++c) {
      shifts.push_back(head.offsets[c]);
      shifts.push_back(-head.offsets[c]);
    }
    std::sort(shifts.begin(), shifts.end());
    for (const int64_t shift : shifts) {
      if (head.ranges.empty() || shift > head.ranges.back().second) {
        head.ranges.emplace_back(shift, shift + rows);
      } else {
        head.ranges.back().second = shift + rows;
      }
    }
    const auto packed_row = [&](int64_t shift) {
      int64_t before = 0;
      for (const auto& [from, to] : head.ranges) {
        if (shift >= from && shift + rows <= to) return before + shift - from;
        before += to - from;
      }
      return int64_t{0};
    };
    for (int64_t c = 0; c < head.count; ++c) {
      head.ahead.push_back(packed_row(head.offsets[c]));
      head.behind.push_back(packed_row(-head.offsets[c]));
    }
    head.own = packed_row(0);
    for (const auto& [from, to] : head.ranges) head.packed += to - from;
  }

  int64_t pairs() const { return B * padded * columns; }
  int64_t width(int64_t h) const { return (h + 1 < H ? heads[h + 1].start : columns) - heads[h].start; }
  // Index of row 0 of a column in a per-pair array.
  int64_t at(int64_t b, int64_t h, int64_t column) const {
    return padded * (B * heads[h].start + b * width(h) + column);
  }
  // Index of key 0 of a prefix row in an array (B, H, P, T).
  int64_t row(int64_t b, int64_t h, int64_t p) const { return ((b * H + h) * P + p) * (P + N); }
  float prefix_factor(int64_t h) const { return scale * (prefix_weights ? prefix_weights[h] : 1.0f); }
  // Weights of a column for the rows of a block from j0 on, 0 where there is no key.
  vec weights(int64_t h, int64_t c, int64_t j0, const Span& keys) const {
    const Head& head = heads[h];
    if (head.is_self(c)) return keys.mask() ? splat(self_weights[h]) : vec{};
    const float* own = pair_weights + begin[head.first + c] + std::min<int64_t>(head.offsets[c], 0);
    return load_lanes(own + j0, keys.from, keys.to);
  }
  // The factors of a column's pairs under mask_fill "zero" if they were not in the support.
  vec floor_of(const Head& head, int64_t column, int64_t j0, int64_t rows, vec floor_value) const {
    return (column < P ? lanes(0, rows) : head.valid(column - P, j0, rows, N).mask()) ? floor_value : vec{};
  }
};

namespace {

using Problem = DiagonalProblem;

// 16 rows; with a step of 0, the same row 16 times.
template <typename E>
struct Block {
  const E* data;
  int64_t step;
};
// Patches of a tensor from j0 on: in place if possible, otherwise packed.
template <typename E>
inline Block<E> block_of(const Problem& x, const View& view, int64_t b, int64_t h, int64_t j0, E* scratch) {
  if (j0 <= -L || j0 >= x.N) return {(const E*)x.zeros.data(), 0};
  if (j0 >= 0 && j0 + L <= x.N && in_place<E>(view)) return {view.of<E>(b, h, x.P + j0), view.token};
  read_rows(view, b, h, x.P + j0, x.P + j0 + L, x.P, x.P + x.N, scratch);
  return {scratch, x.size};
}

// The loops that take nearly all time. V: vectors of a packed row, 0 if it is only known at run time.

// Dot products of 16 rows with 16 rows.
template <int V, typename E>
SPARSEPRIOR_INLINE vec dots(int64_t size, Block<E> a, Block<E> b) {
  typedef Elements<E> Own;
  constexpr int64_t STEP = L * Own::VECTORS;
  vec x[L];
#pragma GCC unroll 16
  for (int r = 0; r < L; ++r) {
    x[r] = Own::product(Own::read(a.data), Own::read(b.data));
#pragma GCC unroll 8
    for (int64_t i = STEP; i < (V ? L * V : size); i += STEP) {
      x[r] = Own::dot(x[r], Own::read(a.data + i), Own::read(b.data + i));
    }
    a.data += a.step;
    b.data += b.step;
  }
  return sums(x);
}

// The same for 4 columns at once, which reads each row of `a` once.
template <int V, typename E>
SPARSEPRIOR_INLINE void dots4(int64_t size, Block<E> a, const Block<E> columns[4], vec out[4]) {
  typedef Elements<E> Own;
  constexpr int64_t STEP = L * Own::VECTORS;
  Block<E> b[4];
  std::copy_n(columns, 4, b);
  vec part[4];
  for (int group = 0; group < 4; ++group) {  // 4 rows: block c of 4 lanes is column c's
    vec x[L];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const typename Own::Register first = Own::read(a.data);
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) x[4 * c + r] = Own::product(first, Own::read(b[c].data));
#pragma GCC unroll 8
      for (int64_t i = STEP; i < (V ? L * V : size); i += STEP) {
        const typename Own::Register own = Own::read(a.data + i);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) x[4 * c + r] = Own::dot(x[4 * c + r], own, Own::read(b[c].data + i));
      }
      a.data += a.step;
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) b[c].data += b[c].step;
    }
    part[group] = sums(x);
  }
  const vec low = blocks<0, 1>(part[0], part[1]), high = blocks<0, 1>(part[2], part[3]);
  const vec low2 = blocks<2, 3>(part[0], part[1]), high2 = blocks<2, 3>(part[2], part[3]);
  out[0] = blocks<0, 2>(low, high);
  out[1] = blocks<1, 3>(low, high);
  out[2] = blocks<0, 2>(low2, high2);
  out[3] = blocks<1, 3>(low2, high2);
}

// Dot products of a block's rows with every column's: out (columns, 16).
template <int V, typename E>
SPARSEPRIOR_INLINE void column_dots(
    int64_t size, const Block<E>& rows, const Block<E>* columns, int64_t count, float* out) {
  int64_t c = 0;
  for (; c + 4 <= count; c += 4, out += 4 * L) {
    vec x[4];
    dots4<V>(size, rows, columns + c, x);
    for (int i = 0; i < 4; ++i) store(out + L * i, x[i]);
  }
  for (; c < count; ++c, out += L) store(out, dots<V>(size, rows, columns[c]));
}

// A block of rows as the sum of columns times their factors (columns, 16), of C columns and S vectors of each row;
// before: the start of the sum, packed; null for zero. Sums of Half are packed as registers have them.
template <int C, int S, typename E, typename T>
inline void mix_slab(
    const Block<E>* columns, const float* factors, int64_t rows, const float* before, int64_t size, bool past_cache,
    T* out, int64_t step) {
  typedef Elements<E> Own;
  Block<E> own[C];
  std::copy_n(columns, C, own);
  for (int64_t r = 0; r < rows; ++r, out += step) {
    vec x[S];
    for (int s = 0; s < S; ++s) x[s] = before ? load(before + r * size + L * s) : vec{};
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      for (int s = 0; s < S; s += Own::VECTORS) Own::add(x + s, factors[L * c + r], Own::read(own[c].data + L * s));
      own[c].data += own[c].step;
    }
    for (int s = 0; s < S; s += Own::VECTORS) {
      past_cache ? Own::write_past_cache(out + L * s, x + s) : Own::write(out + L * s, x + s);
    }
  }
}
template <int C, int V, typename E, typename T>
inline void mix_columns(
    const Block<E>* columns, const float* factors, int64_t rows, const float* before, int64_t size, bool past_cache,
    T* out, int64_t step) {
  Block<E> own[C];
  for (int64_t i = 0; i < (V ? L * V : size);) {
    for (int c = 0; c < C; ++c) own[c] = {columns[c].data + i, columns[c].step};
    const float* sum = before ? before + i : nullptr;
    if (V == 4 || i + 4 * L <= size) {
      mix_slab<C, 4>(own, factors, rows, sum, size, past_cache, out + i, step);
      i += 4 * L;
    } else {
      constexpr int ONE = Elements<E>::VECTORS;
      mix_slab<C, ONE>(own, factors, rows, sum, size, past_cache, out + i, step);
      i += L * ONE;
    }
  }
}
// For any number of columns: four at a time into `scratch`, then the rest.
template <int V, typename E, typename T>
inline void mix(
    const Block<E>* columns, int64_t count, const float* factors, int64_t rows, int64_t size, float* scratch,
    bool past_cache, T* out, int64_t step) {
  const float* before = nullptr;
  for (; count > 5; count -= 4, columns += 4, factors += 4 * L, before = scratch) {
    mix_columns<4, V>(columns, factors, rows, before, size, false, scratch, size);
  }
  switch (count) {
    case 5: return mix_columns<5, V>(columns, factors, rows, before, size, past_cache, out, step);
    case 4: return mix_columns<4, V>(columns, factors, rows, before, size, past_cache, out, step);
    case 3: return mix_columns<3, V>(columns, factors, rows, before, size, past_cache, out, step);
    case 2: return mix_columns<2, V>(columns, factors, rows, before, size, past_cache, out, step);
    default: return mix_columns<1, V>(columns, factors, rows, before, size, past_cache, out, step);
  }
}
// total += sum over `count` rows of factor * row.
template <int V, typename E>
inline void add_rows(int64_t size, int64_t count, const float* factors, const Block<E>& rows, float* total) {
  for (int64_t i = 0; i < (V ? L * V : size); i += L) {
    vec x = load(total + i);
    for (int64_t r = 0; r < count; ++r) x += factors[r] * load(rows.data + r * rows.step + i);
    store(total + i, x);
  }
}
inline void add_row(int64_t size, float factor, const float* row, float* total) {
  add_rows<0>(size, 1, &factor, Block<float>{row, 0}, total);
}

// Memory of one thread. Keys and values of a piece are used by turns, so that what neighbouring rows share of one of
// them stays in the first cache. Arrays over the piece's pairs are (block, column, row in block).
struct Scratch {
  Buffer packed, prefix, block, result, scores, others, rows;
  explicit Scratch(const Problem& x)
      : packed((x.P + x.most_packed) * x.size), prefix(3 * x.P * x.size),
        block(L * x.size), result(L * x.size), scores(x.rows * (x.most_columns + 1)), others(L * x.most_columns),
        rows(x.P * x.rows) {}
};

// A piece: rows first..end of (b, h).
struct Piece {
  const Problem& x;
  const Head& head;
  int64_t b, h, chunk, bh, first, end;
  Piece(const Problem& x_, int64_t i) : Piece(x_, i / (x_.chunks * x_.H), i % x_.H, i / x_.H % x_.chunks) {}
  Piece(const Problem& x_, int64_t b_, int64_t h_, int64_t chunk_)
      : x(x_), head(x_.heads[h_]), b(b_), h(h_), chunk(chunk_), bh(b_ * x_.H + h_), first(chunk_ * x_.chunk),
        end(std::min(x_.N, first + x_.chunk)) {}
  int64_t rows(int64_t j0) const { return std::min<int64_t>(L, end - j0); }
  float* block(const Buffer& pairs, int64_t j0) const { return pairs.data() + (j0 - first) * (head.columns + 1); }
  template <typename E>
  Block<E> block(const View& view, int64_t j0, const Scratch& own) const {
    return block_of(x, view, b, h, j0, (E*)own.block.data());
  }
  template <typename E>
  void prefix(const View& view, E* to) const { read_rows(view, b, h, 0, x.P, 0, x.P, to); }
  // Reads patches from..to of all heads one after the other, which the hardware foresees; the rows of one head, far
  // apart, would be waited for.
  void bring_near(const View& view, int64_t from, int64_t to) const {
    if (view.lane != 1) return;
    const int64_t bytes = view.width * (view.half ? 2 : 4);
    for (int64_t t = x.P + std::max<int64_t>(from, 0); t < x.P + std::min(to, x.N); ++t) {
      for (int64_t head = 0; head < x.H; ++head) {
        const char* row = view.half ? (const char*)view.of<Half>(b, head, t) : (const char*)view.of<float>(b, head, t);
        for (int64_t i = 0; i < bytes; i += 64) (void)*(const volatile char*)(row + i);
      }
    }
  }
};

// The rows of a tensor that a piece needs, as columns: the prefix tokens and the rows at the head's offsets.
template <typename E>
class Rows {
 public:
  Rows(const Piece& piece, const View& view, const Buffer& memory)
      : piece_(piece), view_(view), prefix_((E*)memory.data()), memory_(prefix_ + piece.x.P * piece.x.size),
        packed_(!in_place<E>(view)), columns_(piece.head.columns + 1) {
    const Problem& x = piece.x;
    piece.prefix(view, prefix_);
    for (int64_t p = 0; p < x.P; ++p) columns_[p] = prefix(p);
    if (!packed_) return;
    E* to = memory_;
    for (const auto& [from, to_row] : piece.head.ranges) {
      const int64_t begin = x.P + piece.first + from;
      read_rows(view, piece.b, piece.h, begin, begin + to_row - from, x.P, x.P + x.N, to);
      to += (to_row - from) * x.size;
    }
  }
  // For a block from row j0 on: rows j + offset (ahead) or j - offset for each column, and a last column of one row.
  const Block<E>* ahead(int64_t j0, const E* last = nullptr) { return columns(j0, 1, piece_.head.ahead, last); }
  const Block<E>* behind(int64_t j0, const E* last = nullptr) { return columns(j0, -1, piece_.head.behind, last); }
  Block<E> prefix(int64_t p) const { return {prefix_ + p * piece_.x.size, 0}; }
  Block<E> own(int64_t j0) const { return block(j0, 0, piece_.head.own, piece_.head.count); }

 private:
  const Block<E>* columns(int64_t j0, int64_t sign, const std::vector<int64_t>& places, const E* last) {
    const Head& head = piece_.head;
    Block<E>* to = columns_.data() + piece_.x.P;
    for (int64_t c = 0; c < head.count; ++c) to[c] = block(j0, sign * head.offsets[c], places[c], c);
    to[head.count] = {last, 0};
    return columns_.data();
  }
  // place: that of row first + shift among the packed rows. slot: that of a block at an edge, if rows are in place.
  Block<E> block(int64_t j0, int64_t shift, int64_t place, int64_t slot) const {
    const Problem& x = piece_.x;
    if (packed_) return {memory_ + (place + j0 - piece_.first) * x.size, x.size};
    return block_of(x, view_, piece_.b, piece_.h, j0 + shift, memory_ + slot * L * x.size);
  }
  const Piece& piece_;
  const View& view_;
  E *prefix_, *memory_;  // memory: packed rows, or blocks at the edges
  bool packed_;
  std::vector<Block<E>> columns_;
};

// Whether rows can be written past the caches, which takes aligned addresses. A program's outputs lie where it wants them.
template <typename T>
inline bool streams(const Problem& x, const T* rows, int64_t step) {
  const uintptr_t unit = std::min<uintptr_t>(64, x.size * sizeof(T));
  return x.large && ((uintptr_t)rows | (uintptr_t)(step * (int64_t)sizeof(T))) % unit == 0;
}

// A piece's block of rows from j0 on, mixed from columns, into a tensor.
template <int V, typename E>
inline void mix(
    const Piece& piece, int64_t j0, const Block<E>* columns, int64_t count, const float* factors, const View& to,
    float* scratch) {
  const Problem& x = piece.x;
  const int64_t size = V ? L * V : x.size, rows = piece.rows(j0);
  if (std::is_same_v<E, Half> || (to.whole() && to.half)) {
    Half* out = to.of<Half>(piece.b, piece.h, x.P + j0);
    mix<V>(columns, count, factors, rows, size, scratch, streams(x, out, to.token), out, to.token);
  } else if (to.whole()) {
    float* out = to.of<float>(piece.b, piece.h, x.P + j0);
    mix<V>(columns, count, factors, rows, size, scratch, streams(x, out, to.token), out, to.token);
  } else {
    mix<V>(columns, count, factors, rows, size, scratch, false, scratch, size);
    write_rows(scratch, to, piece.b, piece.h, x.P + j0, rows);
  }
}

// ---- forward --------------------------------------------------------------------------------------------------------

using Forward = DiagonalForward;

// Logits of a block of rows become the factors of their values, in place.
vec softmax(const Piece& piece, const Forward& f, int64_t j0, float* s) {
  const Problem& x = piece.x;
  const Head& head = piece.head;
  const int64_t rows = piece.rows(j0);
  vec highest = splat(MINUS_INF), seen = splat((float)x.P), floor_value = vec{}, total = vec{};
  for (int64_t c = 0; c < head.columns; ++c) highest = maximum(highest, load(s + L * c));
  if (x.zero_fill) {  // every pair outside the support counts exp(0)
    for (int64_t c = 0; c < head.count; ++c) seen += head.valid(c, j0, rows, x.N).mask() ? splat(1.0f) : vec{};
    const vec outside = splat((float)(x.P + x.N)) - seen;
    const veci masked = outside > 0.0f;
    highest = masked ? maximum(highest, vec{}) : highest;
    floor_value = masked ? exp_of(-highest) : vec{};
    total = outside * floor_value;
  }
  const veci exists = lanes(0, rows);
  highest = exists ? highest : vec{};
  for (int64_t c = 0; c < head.columns; ++c) {
    const vec e = exp_of(load(s + L * c) - highest);
    store(s + L * c, e);
    total += e;
  }
  const vec share = 1.0f / (exists ? total : splat(1.0f));
  floor_value *= share;
  for (int64_t c = 0; c < head.columns; ++c) {
    const int64_t pair = x.at(piece.b, piece.h, c) + j0;
    vec kept = load(s + L * c) * share;
    if (f.probs) store(f.probs + pair, kept);
    if (f.drop) kept *= load(f.drop + pair);
    if (x.zero_fill) kept -= x.floor_of(head, c, j0, rows, floor_value);
    store(s + L * c, kept);
  }
  if (f.floors) store(f.floors + piece.bh * x.padded + j0, floor_value);
  return floor_value;
}

template <int V, typename E>
void forward_piece(const Piece& piece, const Forward& f, const Scratch& own) {
  const Problem& x = piece.x;
  const Head& head = piece.head;
  const int64_t P = x.P, size = V ? L * V : x.size, first = piece.first, end = piece.end;
  const float factor = x.prefix_factor(piece.h), *v_sum = x.zero_fill ? f.v_sum + piece.bh * size : nullptr;
  E* prefix_q = (E*)own.prefix.data();
  piece.prefix(f.q, prefix_q);

  Rows<E> keys(piece, f.k, own.packed);
  for (int64_t j0 = first; j0 < end; j0 += L) {
    const int64_t rows = piece.rows(j0);
    float* s = piece.block(own.scores, j0);
    column_dots<V>(size, piece.block<E>(f.q, j0, own), keys.ahead(j0), head.columns, s);
    for (int64_t c = 0; c < head.columns; ++c) {
      vec value = load(s + L * c);
      if (f.logits) store(f.logits + x.at(piece.b, piece.h, c) + j0, value * x.scale);
      if (c < P) {
        value *= factor;
      } else {
        const Span seen = head.valid(c - P, j0, rows, x.N);
        value *= x.scale;
        if (x.decayed) value *= x.weights(piece.h, c - P, j0, seen);
        if (!seen.all()) value = seen.mask() ? value : splat(MINUS_INF);
      }
      store(s + L * c, value);
    }
    for (int64_t p = 0; p < P; ++p) {  // these rows as keys of the prefix tokens
      const vec value = dots<V>(size, keys.own(j0), Block<E>{prefix_q + p * size, 0}) * factor;
      store(own.rows.data() + p * x.rows + j0 - first, lanes(0, rows) ? value : splat(MINUS_INF));
    }
  }

  Rows<E> values(piece, f.v, own.packed);
  for (int64_t j0 = first; j0 < end; j0 += L) {
    float* s = piece.block(own.scores, j0);
    store(s + L * head.columns, softmax(piece, f, j0, s));
    mix<V>(piece, j0, values.ahead(j0, (const E*)v_sum), head.columns + x.zero_fill, s, f.out, own.result.data());
  }
  float* partial = f.partial + (piece.bh * x.chunks + piece.chunk) * P * (2 + size);
  for (int64_t p = 0; p < P; ++p, partial += 2 + size) {
    const int64_t key = x.row(piece.b, piece.h, p) + P;
    float* logits = own.rows.data() + p * x.rows;
    vec highest = splat(MINUS_INF), total = vec{};
    for (int64_t j0 = first; j0 < end; j0 += L) highest = maximum(highest, load(logits + j0 - first));
    const float top = maximum(highest), finite = top == MINUS_INF ? 0.0f : top;  // other pieces can have finite logits
    std::fill_n(partial + 2, size, 0.0f);
    for (int64_t j0 = first; j0 < end; j0 += L) {
      const int64_t rows = piece.rows(j0);
      const vec logit = load(logits + j0 - first);
      if (f.rows) store_lanes(f.rows + key + j0, logit, rows);
      vec e = exp_of(logit - finite);
      total += e;
      if (f.drop) e *= load_lanes(f.drop + x.pairs() + key + j0, 0, rows);
      store(logits + j0 - first, e);
      add_rows<V>(size, rows, logits + j0 - first, values.own(j0), partial + 2);
    }
    partial[0] = top;
    partial[1] = sum(total);
  }
}

// Prefix rows: the pieces' sums and the prefix keys. Logits become probabilities if they are kept.
void forward_prefix(const Problem& x, const Forward& f, int64_t b, int64_t h) {
  const int64_t P = x.P, T = P + x.N, size = x.size, step = P * (2 + size), bh = b * x.H + h;
  Buffer q(P * size), k(P * size), v(P * size), logits(P), result(size);
  read_rows(f.q, b, h, 0, P, 0, P, q.data());
  read_rows(f.k, b, h, 0, P, 0, P, k.data());
  read_rows(f.v, b, h, 0, P, 0, P, v.data());
  for (int64_t p = 0; p < P; ++p) {
    const float* pieces = f.partial + bh * x.chunks * step + p * (2 + size);
    float* own = logits.data();
    float top = MINUS_INF, total = 0.0f;
    for (int64_t t = 0; t < P; ++t) {
      own[t] = x.prefix_factor(h) * dot(q.data() + p * size, k.data() + t * size, size);
      top = std::max(top, own[t]);
    }
    for (int64_t i = 0; i < x.chunks; ++i) top = std::max(top, pieces[i * step]);
    std::fill_n(result.data(), size, 0.0f);
    for (int64_t t = 0; t < P; ++t) {
      const float e = std::exp(own[t] - top);
      total += e;
      if (f.rows) f.rows[x.row(b, h, p) + t] = own[t];
      const float kept = f.drop ? e * f.drop[x.pairs() + x.row(b, h, p) + t] : e;
      add_row(size, kept, v.data() + t * size, result.data());
    }
    for (int64_t i = 0; i < x.chunks; ++i) {
      const float shrink = std::exp(pieces[i * step] - top);
      total += shrink * pieces[i * step + 1];
      add_row(size, shrink, pieces + i * step + 2, result.data());
    }
    const float share = 1.0f / total;
    for (int64_t i = 0; i < size; ++i) result.data()[i] *= share;
    write_rows(result.data(), f.out, b, h, p, 1);
    if (!f.rows) continue;
    float* row = f.rows + x.row(b, h, p);
    for (int64_t t = 0; t < T; t += L) {
      const int64_t count = std::min<int64_t>(L, T - t);
      store_lanes(row + t, exp_of(load_lanes(row + t, 0, count) - top) * share, count);
    }
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------

using Backward = DiagonalBackward;
inline int64_t sums_size(const Problem& x) { return (3 * x.P + 1) * x.size + 1; }

// Gradients of the queries of a piece, and of the products of all its pairs.
template <int V, typename E>
void backward_rows(const Piece& piece, const Backward& f, const Scratch& own) {
  const Problem& x = piece.x;
  const Head& head = piece.head;
  const int64_t P = x.P, size = V ? L * V : x.size, first = piece.first, end = piece.end;
  E *prefix_q = (E*)own.prefix.data(), *prefix_g = prefix_q + P * size, *prefix_out = prefix_g + P * size;
  const float factor = x.prefix_factor(piece.h);
  float* sums = f.sums + (piece.bh * x.chunks + piece.chunk) * sums_size(x);
  std::fill_n(sums, sums_size(x), 0.0f);
  float *dq_prefix = sums, *dk_prefix = sums + P * size, *dv_prefix = sums + 2 * P * size, *floor_sum = sums + 3 * P * size;
  vec prefix_sum = vec{};
  piece.prefix(f.q, prefix_q);
  piece.prefix(f.grad, prefix_g);
  piece.prefix(f.out, prefix_out);
  std::vector<float> row_deltas(P);
  // By `dots`, as the gradients of the probabilities from which they are subtracted: where one key has all the weight, the
  // difference is then exactly 0, whatever large number it is multiplied with.
  for (int64_t p = 0; p < P; ++p) {
    row_deltas[p] = dots<V>(size, Block<E>{prefix_out + p * size, 0}, Block<E>{prefix_g + p * size, 0})[0];
  }

  Rows<E> values(piece, f.v, own.packed);
  for (int64_t j0 = first; j0 < end; j0 += L) {
    const int64_t rows = piece.rows(j0);
    float *ds = piece.block(own.scores, j0), *kept = own.others.data();
    const Block<E> g = piece.block<E>(f.grad, j0, own);
    vec floor_value = vec{}, delta = vec{};
    if (x.zero_fill) {
      floor_value = load(f.floors + piece.bh * x.padded + j0);
      delta = floor_value * dots<V>(size, g, Block<E>{(const E*)f.v_sum + piece.bh * size, 0});
      float floors[L];
      store(floors, floor_value);
      add_rows<V>(size, rows, floors, g, floor_sum);
    }
    column_dots<V>(size, g, values.ahead(j0), head.columns, ds);
    for (int64_t c = 0; c < head.columns; ++c) {
      vec dp = load(ds + L * c);
      const int64_t pair = x.at(piece.b, piece.h, c) + j0;
      vec p = load(f.probs + pair);
      if (x.zero_fill) p -= x.floor_of(head, c, j0, rows, floor_value);
      if (f.drop) dp *= load(f.drop + pair);
      delta += p * dp;
      if (f.drop) p *= load(f.drop + pair);
      if (c < P) store(kept + L * c, p);
      store(ds + L * c, dp);
    }
    for (int64_t c = 0; c < head.columns; ++c) {
      const int64_t pair = x.at(piece.b, piece.h, c) + j0;
      vec value = load(f.probs + pair) * (load(ds + L * c) - delta);
      if (x.decayed) {
        const vec product = value * load(f.logits + pair);
        store(f.weight_grads + pair, product);
        if (c < P) {
          prefix_sum += lanes(0, rows) ? product : vec{};
        } else {
          value *= x.weights(piece.h, c - P, j0, head.valid(c - P, j0, rows, x.N));
        }
      }
      value *= c < P ? factor : x.scale;
      store(ds + L * c, value);
      store(f.pair_grads + pair, value);
    }
    for (int64_t p = 0; p < P; ++p) {
      add_rows<V>(size, rows, kept + L * p, g, dv_prefix + p * size);
      // These rows as keys of the prefix rows.
      const int64_t key = x.row(piece.b, piece.h, p) + P + j0;
      vec dp = dots<V>(size, values.own(j0), Block<E>{prefix_g + p * size, 0});
      if (f.drop) dp *= load_lanes(f.drop + x.pairs() + key, 0, rows);
      store(own.rows.data() + p * x.rows + j0 - first, load_lanes(f.rows + key, 0, rows) * (dp - row_deltas[p]));
    }
  }

  Rows<E> keys(piece, f.k, own.packed);
  for (int64_t j0 = first; j0 < end; j0 += L) {
    const int64_t rows = piece.rows(j0);
    const float* ds = piece.block(own.scores, j0);
    for (int64_t p = 0; p < P; ++p) {
      add_rows<V>(size, rows, ds + L * p, piece.block<E>(f.q, j0, own), dk_prefix + p * size);
      const Block<E> k = keys.own(j0);
      float* row = own.rows.data() + p * x.rows + j0 - first;
      const vec value = load(row);
      if (x.decayed) prefix_sum += value * dots<V>(size, k, Block<E>{prefix_q + p * size, 0}) * x.scale;
      store(row, value * factor);
      std::copy_n(row, rows, f.row_grads + x.row(piece.b, piece.h, p) + P + j0);
      add_rows<V>(size, rows, row, k, dq_prefix + p * size);
    }
    mix<V>(piece, j0, keys.ahead(j0), head.columns, ds, f.dq, own.result.data());
  }
  sums[sums_size(x) - 1] = sum(prefix_sum);
}

// Prefix tokens among themselves, and the sums of all pieces; the first piece's sums become the whole.
void backward_prefix(const Problem& x, const Backward& f, int64_t b, int64_t h) {
  const int64_t P = x.P, size = x.size;
  float* sums = f.sums + (b * x.H + h) * x.chunks * sums_size(x);
  for (int64_t chunk = 1; chunk < x.chunks; ++chunk) {
    for (int64_t i = 0; i < sums_size(x); ++i) sums[i] += sums[chunk * sums_size(x) + i];
  }
  float *dq = sums, *dk = sums + P * size, *dv = sums + 2 * P * size, *floor_sum = sums + 3 * P * size;
  const Buffer q(P * size), k(P * size), v(P * size), g(P * size), out(P * size);
  const auto read_prefix = [&](const View& view, const Buffer& to) { read_rows(view, b, h, 0, P, 0, P, to.data()); };
  read_prefix(f.q, q);
  read_prefix(f.k, k);
  read_prefix(f.v, v);
  read_prefix(f.grad, g);
  read_prefix(f.out, out);
  for (int64_t p = 0; p < P; ++p) {
    const float *query = q.data() + p * size, *gradient = g.data() + p * size;
    const float delta = dot(gradient, out.data() + p * size, size);
    for (int64_t t = 0; t < P; ++t) {
      const int64_t pair = x.row(b, h, p) + t;
      const float drop = f.drop ? f.drop[x.pairs() + pair] : 1.0f, kept = f.rows[pair] * drop;
      const float ds = f.rows[pair] * (drop * dot(gradient, v.data() + t * size, size) - delta);
      const float scaled = ds * x.prefix_factor(h);
      sums[sums_size(x) - 1] += ds * dot(query, k.data() + t * size, size) * x.scale;
      f.row_grads[pair] = scaled;
      add_row(size, scaled, k.data() + t * size, dq + p * size);
      add_row(size, scaled, query, dk + t * size);
      add_row(size, kept, gradient, dv + t * size);
    }
  }
  for (int64_t p = 0; p < P; ++p) {
    if (x.zero_fill) add_row(size, 1.0f, floor_sum, dv + p * size);
  }
  write_rows(dq, f.dq, b, h, 0, P);
  write_rows(dk, f.dk, b, h, 0, P);
  write_rows(dv, f.dv, b, h, 0, P);
}

// Gradients of the keys and values of a piece, gathered from the rows that see them.
template <int V, typename E>
void backward_keys(const Piece& piece, const Backward& f, const Scratch& own) {
  const Problem& x = piece.x;
  const Head& head = piece.head;
  const int64_t P = x.P, size = V ? L * V : x.size;
  float* factors = own.scores.data();
  // For every pair of a key: its entry in arrays over (column, row) and over (prefix token, key).
  const auto gather = [&](const View& from, const View& to, const float* base, const auto& prefix_factor,
                          const auto& pair_factor) {
    Rows<E> seeing(piece, from, own.packed);
    store(factors + L * head.columns, splat(1.0f));
    for (int64_t m0 = piece.first; m0 < piece.end; m0 += L) {
      const int64_t keys = piece.rows(m0);
      for (int64_t p = 0; p < P; ++p) {
        store(factors + L * p, prefix_factor(x.row(piece.b, piece.h, p) + P + m0, keys));
      }
      for (int64_t c = 0; c < head.count; ++c) {
        const int64_t j0 = m0 - head.offsets[c];
        const Span seen = head.valid(c, j0, keys, x.N);
        const int64_t low = std::max(seen.from, -j0), high = std::max(low, std::min(seen.to, x.N - j0));
        store(factors + L * (P + c), pair_factor(x.at(piece.b, piece.h, P + c), j0, low, high));
      }
      mix<V>(piece, m0, seeing.behind(m0, (const E*)base), head.columns + (base ? 1 : 0), factors, to, own.result.data());
    }
  };
  gather(
      f.q, f.dk, nullptr, [&](int64_t key, int64_t keys) { return load_lanes(f.row_grads + key, 0, keys); },
      [&](int64_t column, int64_t j0, int64_t low, int64_t high) {
        return load_lanes(f.pair_grads + column + j0, low, high);
      });
  gather(
      f.grad, f.dv, x.zero_fill ? f.sums + piece.bh * x.chunks * sums_size(x) + 3 * P * size : nullptr,
      [&](int64_t key, int64_t keys) {
        const vec p = load_lanes(f.rows + key, 0, keys);
        return f.drop ? p * load_lanes(f.drop + x.pairs() + key, 0, keys) : p;
      },
      [&](int64_t column, int64_t j0, int64_t low, int64_t high) {
        vec p = load_lanes(f.probs + column + j0, low, high);
        if (f.drop) p *= load_lanes(f.drop + column + j0, low, high);
        if (x.zero_fill) p -= load_lanes(f.floors + piece.bh * x.padded + j0, low, high);
        return p;
      });
}

// Gradients of the weights of a head's pairs: sums over the batch, and over both directions of a pair.
void backward_weights(const Problem& x, const Backward& f, int64_t h, float* d_pairs, float& d_prefix, float& d_self) {
  const Head& head = x.heads[h];
  for (int64_t c = 0; c < head.count; ++c) {
    const int64_t offset = head.offsets[c];
    const auto [from, to] = head.valid(c, 0, x.N, x.N);
    for (int64_t b = 0; b < x.B; ++b) {
      const float* products = f.weight_grads + x.at(b, h, x.P + c);
      if (head.is_self(c)) {
        for (int64_t j = from; j < to; ++j) d_self += products[j];
      } else {
        float* own = d_pairs + x.begin[head.first + c] + std::min<int64_t>(offset, 0);
        for (int64_t j = from; j < to; ++j) own[j] += products[j];
      }
    }
  }
  for (int64_t b = 0; b < x.B; ++b) d_prefix += f.sums[((b * x.H + h) * x.chunks + 1) * sums_size(x) - 1];
}

// ---- both passes ----------------------------------------------------------------------------------------------------

// Pieces in the order of memory: all heads of some rows, then the next rows. The work reads `own_inputs` at a piece's
// rows, and `seen` at the offsets too.
template <typename F>
void for_pieces(
    const Problem& x, std::initializer_list<const View*> own_inputs, std::initializer_list<const View*> seen, const F& run) {
  parallel_for(x.B * x.chunks * x.H, 1, [&](int64_t begin, int64_t end) {
    const Scratch own(x);
    for (int64_t i = begin; i < end; ++i) {
      const Piece piece(x, i);
      if (x.large && (i == begin || piece.h == 0)) {
        const bool fresh = i == begin || piece.chunk == 0;
        const int64_t from = fresh ? piece.first - x.farthest : piece.first + x.farthest;
        for (const View* view : own_inputs) piece.bring_near(*view, piece.first, piece.end);
        for (const View* view : seen) piece.bring_near(*view, from, piece.end + x.farthest);
      }
      run(piece, own);
    }
    finish_streams();
  });
}
template <typename F>
void for_heads(const Problem& x, const F& run) {
  parallel_for(x.B * x.H, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(i / x.H, i % x.H);
  });
}

// A pass for rows of any width and of 64, which are packed or read in place; then for those of Half in place.
constexpr decltype(&forward_piece<0, float>) FORWARD[] = {
    forward_piece<0, float>, forward_piece<4, float>, forward_piece<0, Half>, forward_piece<4, Half>};
constexpr decltype(&backward_rows<0, float>) BACKWARD_ROWS[] = {
    backward_rows<0, float>, backward_rows<4, float>, backward_rows<0, Half>, backward_rows<4, Half>};
constexpr decltype(&backward_keys<0, float>) BACKWARD_KEYS[] = {
    backward_keys<0, float>, backward_keys<4, float>, backward_keys<0, Half>, backward_keys<4, Half>};
int shape(const Problem& x, std::initializer_list<const View*> views) {
  // Sums of v and of gradients, which "zero" needs as rows, are float32.
  const auto fits = [](const View* view) { return in_place<Half>(*view); };
  const bool halves = !x.zero_fill && std::all_of(views.begin(), views.end(), fits);
  return 2 * halves + (x.size == 64);
}

}  // namespace

Diagonal::Diagonal(const DiagonalInputs& inputs) : problem_(std::make_unique<DiagonalProblem>(inputs)) {}
Diagonal::~Diagonal() = default;

int64_t Diagonal::pairs() const { return problem_->pairs(); }
int64_t Diagonal::floors() const { return problem_->B * problem_->H * problem_->padded; }
int64_t Diagonal::partial() const {
  const Problem& x = *problem_;
  return x.B * x.H * x.chunks * x.P * (2 + x.size);
}
int64_t Diagonal::sums() const {
  const Problem& x = *problem_;
  return x.B * x.H * x.chunks * sums_size(x);
}

void Diagonal::forward(const DiagonalForward& f) const {
  const Problem& x = *problem_;
  const int own_shape = shape(x, {&f.q, &f.k, &f.v, &f.out});
  for_pieces(x, {&f.q}, {&f.k, &f.v}, [&](const Piece& piece, const Scratch& own) {
    FORWARD[own_shape](piece, f, own);
  });
  if (x.P) for_heads(x, [&](int64_t b, int64_t h) { forward_prefix(x, f, b, h); });
}

void Diagonal::backward(const DiagonalBackward& f) const {
  const Problem& x = *problem_;
  const int own_shape = shape(x, {&f.q, &f.k, &f.v, &f.out, &f.grad, &f.dq, &f.dk, &f.dv});
  for_pieces(x, {&f.grad}, {&f.k, &f.v}, [&](const Piece& piece, const Scratch& own) {
    BACKWARD_ROWS[own_shape](piece, f, own);
  });
  for_heads(x, [&](int64_t b, int64_t h) { backward_prefix(x, f, b, h); });
  for_pieces(x, {}, {&f.q, &f.grad}, [&](const Piece& piece, const Scratch& own) {
    BACKWARD_KEYS[own_shape](piece, f, own);
  });
  if (!x.decayed) return;
  parallel_for(x.H, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) backward_weights(x, f, h, f.d_pairs, f.d_prefix[h], f.d_self[h]);
  });
}

}  // namespace sparseprior

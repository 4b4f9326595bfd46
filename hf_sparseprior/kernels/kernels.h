// The kernels: C++ that takes addresses and sizes and knows no framework. operators_cpu.cpp makes them operators of torch:
// it checks shapes, makes the memory, and lends them torch's threads.
//
// Shapes: B batch, H heads, T = P + N tokens, P prefix tokens, N patches, D head width.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

namespace sparseprior {

constexpr int L = 16;  // lanes of a vector

inline int64_t vectors(int64_t width) { return (width + L - 1) / L; }
// Floats of a row that is packed in whole vectors.
inline int64_t packed_width(int64_t width) { return L * vectors(width); }

// bfloat16, rounded to nearest, ties to even.
struct Half {
  uint16_t bits;

  Half() = default;
  explicit Half(float x) {
    uint32_t own;
    std::memcpy(&own, &x, sizeof own);
    bits = x != x ? 0x7fc0 : (uint16_t)((own + 0x7fff + ((own >> 16) & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t own = (uint32_t)bits << 16;
    float x;
    std::memcpy(&x, &own, sizeof x);
    return x;
  }
};

// A tensor (B, H, T, D) of float32 or bfloat16 with any strides, counted in elements.
struct View {
  char* data;
  int64_t batch, head, token, lane, width;
  bool half;

  template <typename T>
  T* of(int64_t b, int64_t h, int64_t t) const {
    return (T*)data + b * batch + h * head + t * token;
  }
  // Elements are neighbours and fill whole vectors.
  bool whole() const { return lane == 1 && width % L == 0; }
};

// Does work on 0..count with the caller's threads, each at least `grain` at a time. Whoever links the kernels has both.
void run_parallel(
    int64_t count, int64_t grain, void (*work)(const void* context, int64_t begin, int64_t end), const void* context);
// How many threads that would be.
int64_t parallel_threads();

template <typename F>
void parallel_for(int64_t count, int64_t grain, const F& work) {
  run_parallel(
      count, grain, [](const void* own, int64_t begin, int64_t end) { (*(const F*)own)(begin, end); }, &work);
}

// Rows of each of `parts` parts, in whole blocks.
inline int64_t rows_of_part(int64_t rows, int64_t block, int64_t parts) {
  return ((rows + block - 1) / block + parts - 1) / parts * block;
}
// In how many parts to cut the rows of each of `pieces`, so that the threads end soonest. A part begins with work that takes
// as long as `overhead` rows.
inline int64_t parts_for_threads(int64_t pieces, int64_t rows, int64_t block, int64_t overhead) {
  const int64_t threads = parallel_threads(), most = std::min((rows + block - 1) / block, 2 * threads);
  int64_t best = 1, soonest = std::numeric_limits<int64_t>::max();
  for (int64_t parts = 1; parts <= most; ++parts) {
    const int64_t time = (pieces * parts + threads - 1) / threads * (rows_of_part(rows, block, parts) + overhead);
    if (time < soonest) {
      soonest = time;
      best = parts;
    }
  }
  return best;
}

// ---- along diagonals ------------------------------------------------------------------------------------------------

// Small arrays are contiguous, and must live as long as what is made of them. Offsets are signed, head after head, and
// counts (H) say how many each head has.
struct DiagonalInputs {
  View q, k, v;
  int64_t B, H, T, P;
  const int32_t *offsets, *counts;
  float scale;
  bool zero_fill, decayed;
  // With a decay: weights of pairs, of which there may be none, where in them those of an offset begin, and one number a
  // head (H) for pairs with prefix tokens and for patches with themselves only.
  const float* pair_weights;
  const int64_t* pair_begin;
  const float *prefix_weights, *self_weights;
};
struct DiagonalForward {
  View q, k, v, out;
  const float *drop, *v_sum;              // null if there is none; v_sum: packed rows (B, H), sums of v
  float *probs, *logits, *floors, *rows;  // null if nothing is kept
  float* partial;  // for each piece and prefix token: maximum, sum and weighted sum of v of its softmax over the piece
};
struct DiagonalBackward {
  View q, k, v, out, grad, dq, dk, dv;
  const float *drop, *v_sum, *probs, *logits, *floors, *rows;
  float *pair_grads, *weight_grads;  // gradients of the scaled products of pairs, and of their weights
  float* row_grads;                  // the same of the prefix rows' products
  // For each piece: gradients of the prefix tokens' q, k, v, the sum of floor * gradient of the rows, and the gradient
  // of the prefix weight.
  float* sums;
  float *d_pairs, *d_prefix, *d_self;  // gradients of the weights, zeros at first, with a decay
};

struct DiagonalProblem;

class Diagonal {
 public:
  explicit Diagonal(const DiagonalInputs& inputs);
  ~Diagonal();
  // Numbers of floats: of per-pair arrays (probs, logits, pair_grads, weight_grads), of floors, of partial and of sums.
  int64_t pairs() const;
  int64_t floors() const;
  int64_t partial() const;
  int64_t sums() const;
  void forward(const DiagonalForward& f) const;
  void backward(const DiagonalBackward& f) const;

 private:
  std::unique_ptr<DiagonalProblem> problem_;
};

// ---- weights of pairs -------------------------------------------------------------------------------------------------

// Offsets, counts and begin as of DiagonalInputs, of whose pair_weights these are the values.
struct WeightInputs {
  int64_t H, N, C, A;                             // C curves, A axes of a position
  const float *positions, *log_gamma, *alpha;     // (1 or H, C, A, N), (C, H), (H)
  const int32_t *offsets, *counts;
  const int64_t* begin;
  bool own_positions;  // whether each head has its own
};

void pair_weights(const WeightInputs& inputs, float* out);
// grad: of the weights. d_log_gamma (C, H), d_alpha (H).
void pair_weights_backward(const WeightInputs& inputs, const float* grad, float* d_log_gamma, float* d_alpha);

struct ListedWeightInputs {
  int64_t G, H, N, P, K, C, A;  // G lists of keys: 1, or one for each image
  const float* positions;       // (C, A, N)
  const int32_t* keys;          // (G, H, N, K), -1 where there is none
  const float *log_gamma, *alpha, *prefix_gamma;  // (C, H), (H), (H)
};

// out (G, H, N, K), 0 where there is no key.
void listed_weights(const ListedWeightInputs& inputs, float* out);
void listed_weights_backward(
    const ListedWeightInputs& inputs, const float* grad, float* d_log_gamma, float* d_alpha, float* d_prefix_gamma);

// ---- dense with a decay ---------------------------------------------------------------------------------------------

struct DecayedInputs {
  View q, k, v;
  int64_t B, H, T, P, C, A;  // C curves, A axes of a position
  const float *positions, *log_gamma, *alpha, *prefix_gamma;  // (C, A, N), (C, H), (H), (H)
  float scale;
};
struct DecayedGradients {
  View grad, dq, dk, dv;
  float* sums;     // (H, pieces, 2 + C): of alpha, prefix_gamma and log_gamma
  float* partial;  // memory for what the parts of the query rows add to dk and dv; null if there is one part
};

// In how many pieces of a head the sums of the backward pass come, and the number of floats of `partial`.
int64_t decayed_pieces(const DecayedInputs& inputs);
int64_t decayed_partial(const DecayedInputs& inputs);
void decayed_forward(const DecayedInputs& inputs, const View& out);
void decayed_backward(const DecayedInputs& inputs, const DecayedGradients& f);

// ---- over lists of keys ---------------------------------------------------------------------------------------------

struct ListedInputs {
  View q, k, v;
  int64_t B, H, T, P, K;  // K places of a list
  const int32_t* keys;    // (1 or B, H, N, K), -1 after the last, none empty
  const float *factor, *prefix_factor;  // (1 or B, H, N, K), (H); null: 1
  bool own_keys, own_factor;            // whether each image has its own
  float scale;
};
struct ListedGradients {
  View grad, dq, dk, dv;
  float *factor, *prefix;  // as `factor`, zeros at first, and (B, H); null if they are not wanted
};

// Whether all keys (rows, K) are tokens or -1, and no list is empty.
bool listed_keys_fit(const int32_t* keys, int64_t rows, int64_t K, int64_t T);
void listed_forward(const ListedInputs& inputs, const View& out);
void listed_backward(const ListedInputs& inputs, const ListedGradients& f);

// ---- predicted keys -------------------------------------------------------------------------------------------------

struct CoefficientInputs {
  View q, k;
  int64_t B, H, T, P, R;
  const float* down;  // (R, N)
  float scale;
  float* out;  // (B, H, N, R)
};
void predicted_coefficients(const CoefficientInputs& inputs);

// The keys of `rows` rows of N patches each, (rows, prefix + budget). coefficients: (rows, R). basis: R packed rows of N.
void predicted_keys(
    const float* coefficients, const float* basis, int64_t rows, int64_t N, int64_t R, int64_t prefix, int64_t budget,
    float threshold, int32_t* keys);

}  // namespace sparseprior

// The operators of exported files, for programs other than torch: what each takes and gives, in one list that every such
// host reads. Names, inputs, attributes and what they mean are frozen: files that were written before must run.
//
// Queries, keys, values and outputs of attention are float32 (batch, tokens, heads, head width), as projections write
// them. Everything else is as of torch's operators.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "arrays.h"

namespace sparseprior {

constexpr const char* DOMAIN_NAME = "hf_sparseprior";
constexpr int DOMAIN_VERSION = 1;

struct Attributes {
  int64_t prefix = 0, zero_fill = 0, pairs = 0, budget = 0;
  float scale = 1, threshold = 0;
};
// Inputs in order; null for one that is left out.
using Inputs = std::span<const Tensor* const>;

struct ProgramOperator {
  struct Input {
    const char* name;
    Dtype dtype;
    size_t axes;
    bool optional = false;
  };
  struct Integer {
    const char* name;
    int64_t Attributes::*field;
  };
  struct Float {
    const char* name;
    float Attributes::*field;
  };

  const char* name;
  std::vector<Input> inputs;
  Dtype output;
  std::vector<Integer> integers;
  std::vector<Float> floats;
  // Sizes of the output from those of the inputs, of which one that is not known yet is -1.
  std::vector<int64_t> (*shape)(std::span<const std::vector<int64_t>> inputs, const Attributes& own);
  void (*run)(Inputs inputs, const Attributes& own, void* out);
};

constexpr size_t NUM_PROGRAM_OPERATORS = 7;
const std::vector<ProgramOperator>& program_operators();

// The output has the shape of the first input.
std::vector<int64_t> shape_of_first(std::span<const std::vector<int64_t>> inputs, const Attributes& own);

// Raises an error if an input is missing, or has another number of axes, of which `shape` reads.
void check_ranks(const ProgramOperator& own, std::span<const std::vector<int64_t>> inputs);

}  // namespace sparseprior

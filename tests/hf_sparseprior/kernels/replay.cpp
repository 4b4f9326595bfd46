// Runs recorded calls of the operators and writes what they give: replay CALLS OUTPUTS. replay.py writes and reads both.

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "program_operators.h"

namespace sparseprior {
// One thread does the parts of three.
int64_t parallel_threads() { return 3; }
void run_parallel(int64_t count, int64_t, void (*work)(const void*, int64_t, int64_t), const void* context) {
  for (int64_t part = 0; part < 3; ++part) {
    const int64_t begin = count * part / 3, end = count * (part + 1) / 3;
    if (begin < end) work(context, begin, end);
  }
}
}  // namespace sparseprior

using namespace sparseprior;

template <typename T>
T read(std::istream& from) {
  T value;
  from.read((char*)&value, sizeof(T));
  return value;
}

int main(int, char** words) {
  std::ifstream calls(words[1], std::ios::binary);
  std::ofstream outputs(words[2], std::ios::binary);
  for (int32_t left = read<int32_t>(calls); left--;) {
    std::string name(read<int32_t>(calls), ' ');
    calls.read(name.data(), (std::streamsize)name.size());
    Attributes own;
    for (int64_t* number : {&own.prefix, &own.zero_fill, &own.pairs, &own.budget}) *number = read<int64_t>(calls);
    own.scale = read<float>(calls);
    own.threshold = read<float>(calls);
    std::vector<std::unique_ptr<char[]>> memory;
    std::vector<Tensor> tensors;
    std::vector<bool> given;
    std::vector<std::vector<int64_t>> shapes;
    const int32_t count = read<int32_t>(calls);
    for (int32_t i = 0; i < count; ++i) {
      const int32_t dtype = read<int32_t>(calls);  // -1: left out
      std::vector<int64_t> sizes;
      int64_t numbers = 1;
      if (dtype >= 0) {
        for (int32_t axes = read<int32_t>(calls); axes--;) sizes.push_back(read<int64_t>(calls)), numbers *= sizes.back();
      }
      memory.emplace_back(new char[4 * numbers]);
      if (dtype >= 0) calls.read(memory.back().get(), 4 * numbers);
      given.push_back(dtype >= 0);
      shapes.push_back(sizes);
      tensors.emplace_back(memory.back().get(), sizes, dtype == 1 ? Dtype::int32 : Dtype::float32);
    }
    for (const ProgramOperator& each : program_operators()) {
      if (name != each.name) continue;
      std::vector<const Tensor*> inputs(each.inputs.size(), nullptr);
      for (int32_t i = 0; i < count; ++i) inputs[i] = given[i] ? &tensors[i] : nullptr;
      shapes.resize(each.inputs.size());
      check_ranks(each, shapes);
      int64_t numbers = 1;
      for (int64_t size : each.shape(shapes, own)) numbers *= size;
      const std::unique_ptr<int32_t[]> out(new int32_t[numbers]);
      each.run(inputs, own, out.get());
      outputs.write((const char*)&numbers, sizeof(numbers));
      outputs.write((const char*)out.get(), 4 * numbers);
    }
  }
  return calls && outputs ? 0 : 1;
}

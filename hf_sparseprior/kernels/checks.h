// What the hosts' checks of arguments are written with: lists of sizes, and errors that name what they are about.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <span>
#include <sstream>
#include <stdexcept>

namespace sparseprior {

using Sizes = std::span<const int64_t>;
using List = std::initializer_list<int64_t>;

// ---- errors ---------------------------------------------------------------------------------------------------------

template <typename T>
void print(std::ostream& to, const T& part) {
  to << part;
}
inline void print(std::ostream& to, Sizes sizes) {
  to << '[';
  for (size_t i = 0; i < sizes.size(); ++i) to << (i ? ", " : "") << sizes[i];
  to << ']';
}
// An error of the program's: Python's RuntimeError in torch.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (print(message, parts), ...);
  throw std::runtime_error(message.str());
}
#define SPARSEPRIOR_CHECK(condition, ...) \
  if (!(condition)) [[unlikely]] ::sparseprior::fail(__VA_ARGS__)

}  // namespace sparseprior

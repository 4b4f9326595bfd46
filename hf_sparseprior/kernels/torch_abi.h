// The part of torch's stable C interface that operators_cpu.cpp uses, and tensors on top of it.
//
// torch promises that these functions stay as they are from 2.10 on, so a library needs no headers of torch, is built
// once for all versions, and finds the functions in the libtorch_cpu that the process has loaded.
// tests/hf_sparseprior/kernels/test_torch_abi.py compares the declarations with torch's own.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checks.h"

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
using AOTITorchError = int32_t;  // 0: none
using StableIValue = uint64_t;   // an argument or result: the bytes of a number, a handle, or an address

extern "C" {
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_empty_strided(
    int64_t ndim, const int64_t* sizes_ptr, const int64_t* strides_ptr, int32_t dtype, int32_t device_type,
    int32_t device_index, AtenTensorHandle* ret_new_tensor);
AOTITorchError aoti_torch_zero_(AtenTensorHandle self);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** ret_data_ptr);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* ret_dim);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** ret_sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** ret_strides);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* ret_dtype);
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
AOTITorchError aoti_torch_library_init_fragment(
    const char* ns, const char* file, uint32_t line, TorchLibraryHandle* ret_new_torch_lib);
AOTITorchError aoti_torch_library_init_impl(
    const char* ns, const char* k, const char* file, uint32_t line, TorchLibraryHandle* ret_new_torch_lib);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle self, const char* schema);
AOTITorchError torch_library_impl(
    TorchLibraryHandle self, const char* name, void (*fn)(StableIValue*, uint64_t, uint64_t),
    uint64_t extension_build_version);
AOTITorchError torch_parallel_for(
    int64_t begin, int64_t end, int64_t grain_size, void (*func)(int64_t begin, int64_t end, void* ctx), void* ctx);
AOTITorchError torch_get_num_threads(uint32_t* out_num_threads);
}

namespace sparseprior {

// torch 2.10, whose interface the above is.
constexpr uint64_t ABI_VERSION = (2ull << 56) | (10ull << 48);

enum class Dtype : int32_t {};  // torch's number of it
inline Dtype float32() { return (Dtype)aoti_torch_dtype_float32(); }
inline Dtype bfloat16() { return (Dtype)aoti_torch_dtype_bfloat16(); }
inline Dtype int32() { return (Dtype)aoti_torch_dtype_int32(); }
inline Dtype int64() { return (Dtype)aoti_torch_dtype_int64(); }
// Of a number of the four.
inline int64_t bytes(Dtype dtype) { return dtype == int64() ? 8 : dtype == bfloat16() ? 2 : 4; }

// ---- errors ---------------------------------------------------------------------------------------------------------

inline void print(std::ostream& to, Dtype dtype) {
  if (dtype == float32()) to << "float32";
  else if (dtype == bfloat16()) to << "bfloat16";
  else if (dtype == int32()) to << "int32";
  else if (dtype == int64()) to << "int64";
  else to << "number " << (int32_t)dtype << " of torch";
}

inline void succeed(AOTITorchError error) { SPARSEPRIOR_CHECK(!error, "torch refused a call of the CPU kernels"); }

// ---- tensors --------------------------------------------------------------------------------------------------------

// The only owner of a handle; of none at first.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {
    int64_t dim, *sizes, *strides;
    succeed(aoti_torch_get_dim(handle, &dim));
    succeed(aoti_torch_get_sizes(handle, &sizes));
    succeed(aoti_torch_get_strides(handle, &strides));
    succeed(aoti_torch_get_data_ptr(handle, &data_));
    succeed(aoti_torch_get_dtype(handle, (int32_t*)&dtype_));
    sizes_ = Sizes(sizes, dim);
    strides_ = Sizes(strides, dim);
  }
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(data_, other.data_);
    std::swap(dtype_, other.dtype_);
    std::swap(sizes_, other.sizes_);
    std::swap(strides_, other.strides_);
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle handle() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  void* data() const { return data_; }
  Dtype dtype() const { return dtype_; }
  Sizes sizes() const { return sizes_; }
  Sizes strides() const { return strides_; }
  int64_t dim() const { return (int64_t)sizes_.size(); }
  int64_t size(int64_t i) const { return sizes_[i]; }
  int64_t stride(int64_t i) const { return strides_[i]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t size : sizes_) count *= size;
    return count;
  }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t i = dim(); i--;) {
      if (sizes_[i] == 0) return true;
      if (sizes_[i] != 1 && strides_[i] != expected) return false;
      expected *= sizes_[i];
    }
    return true;
  }

 private:
  AtenTensorHandle handle_ = nullptr;
  void* data_ = nullptr;
  Dtype dtype_{};
  Sizes sizes_, strides_;
};

// New memory is full of NaN, and of -1 as integers. Tests set it, so that what a kernel does not write shows.
extern "C" {
__attribute__((visibility("default"))) inline bool sparseprior_poison = false;
}

inline Tensor empty(Sizes sizes, Sizes strides, Dtype dtype) {
  AtenTensorHandle handle;
  succeed(aoti_torch_empty_strided(
      (int64_t)sizes.size(), sizes.data(), strides.data(), (int32_t)dtype, aoti_torch_device_type_cpu(), 0, &handle));
  Tensor x(handle);
  if (sparseprior_poison && x.numel()) std::memset(x.data(), 0xff, x.numel() * bytes(dtype));
  return x;
}
inline Tensor empty(Sizes sizes, Dtype dtype) {
  std::vector<int64_t> strides(sizes.size());
  for (int64_t i = (int64_t)sizes.size(), step = 1; i--; step *= std::max<int64_t>(sizes[i], 1)) strides[i] = step;
  return empty(sizes, strides, dtype);
}
inline Tensor empty(List sizes, Dtype dtype) { return empty(Sizes(sizes.begin(), sizes.size()), dtype); }

// ---- operators ------------------------------------------------------------------------------------------------------

// An argument of an operator, which the callee owns.
template <typename T>
struct Argument {
  static T take(StableIValue value) {
    T own;
    std::memcpy(&own, &value, sizeof own);
    return own;
  }
};
template <>
struct Argument<Tensor> {
  static Tensor take(StableIValue value) { return Tensor(Argument<AtenTensorHandle>::take(value)); }
};
template <>
struct Argument<std::optional<Tensor>> {
  static std::optional<Tensor> take(StableIValue value) {
    StableIValue* const own = Argument<StableIValue*>::take(value);
    if (!own) return std::nullopt;
    const StableIValue inner = *own;
    delete own;
    return Argument<Tensor>::take(inner);
  }
};

inline StableIValue result(Tensor x) {
  const AtenTensorHandle handle = x.release();
  StableIValue value = 0;
  std::memcpy(&value, &handle, sizeof handle);
  return value;
}

// A function of tensors and numbers as torch calls it.
template <auto function>
struct Boxed;
template <typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct Boxed<function> {
  static void call(StableIValue* stack, uint64_t, uint64_t) { call_with(stack, std::index_sequence_for<Arguments...>()); }

 private:
  template <size_t... I>
  static void call_with(StableIValue* stack, std::index_sequence<I...>) {
    std::tuple<std::decay_t<Arguments>...> own{Argument<std::decay_t<Arguments>>::take(stack[I])...};
    Result out = function(std::get<I>(own)...);
    if constexpr (std::is_same_v<Result, Tensor>) {
      stack[0] = result(std::move(out));
    } else {
      std::apply([&](auto&... each) { ((*stack++ = result(std::move(each))), ...); }, out);
    }
  }
};

// Operators of a library, which live as long as the process.
class Operators {
 public:
  explicit Operators(const char* name) {
    succeed(aoti_torch_library_init_fragment(name, __FILE__, __LINE__, &schemas_));
    succeed(aoti_torch_library_init_impl(name, "CPU", __FILE__, __LINE__, &functions_));
  }
  // A schema, whose name comes first.
  template <auto function>
  void add(const std::string& schema) {
    succeed(aoti_torch_library_def(schemas_, schema.c_str()));
    const std::string name = schema.substr(0, schema.find('('));
    succeed(torch_library_impl(functions_, name.c_str(), &Boxed<function>::call, ABI_VERSION));
  }

 private:
  TorchLibraryHandle schemas_, functions_;
};

}  // namespace sparseprior

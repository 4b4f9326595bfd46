// The operators for ONNX Runtime, as a library that a session registers, against ONNX Runtime's C interface alone.
//
// Its functions are in one table, in which each keeps its place for ever, and the struct of an operator begins with the
// version of the interface that it was written for. So no header is needed, and one library fits every release from 1.17
// on. With -DSPARSEPRIOR_ONNXRUNTIME_HEADER='"…/onnxruntime_c_api.h"' the compiler compares the places with that header.

#include <algorithm>
#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#ifdef SPARSEPRIOR_ONNXRUNTIME_HEADER
#include SPARSEPRIOR_ONNXRUNTIME_HEADER
#endif

#include "kernels.h"
#include "program_operators.h"

namespace {

using sparseprior::Attributes;
using sparseprior::Dtype;
using sparseprior::ProgramOperator;
using sparseprior::Tensor;

constexpr uint32_t VERSION = 17;  // of 1.17, the first with ParallelFor and with shapes of outputs

struct Status {};  // null: no error
struct Options;
struct Domain;
struct KernelInfo;
struct Context;
struct ShapeContext;
struct Value;
struct TypeAndShape;
using Table = const void* const;  // OrtApi, as addresses of functions

// The function at a place of the table.
template <int place, typename Result, typename... Arguments>
Result call(Table* api, Arguments... arguments) {
  return ((Result(*)(Arguments...))api[place])(arguments...);
}
#define SPARSEPRIOR_PLACES(PLACE)              \
  PLACE(CreateStatus, 0)                       \
  PLACE(CreateCustomOpDomain, 26)              \
  PLACE(CustomOpDomain_Add, 27)                \
  PLACE(AddCustomOpDomain, 28)                 \
  PLACE(GetTensorMutableData, 51)              \
  PLACE(GetDimensionsCount, 61)                \
  PLACE(GetDimensions, 62)                     \
  PLACE(GetTensorTypeAndShape, 65)             \
  PLACE(KernelInfoGetAttribute_float, 85)      \
  PLACE(KernelInfoGetAttribute_int64, 86)      \
  PLACE(KernelContext_GetInputCount, 88)       \
  PLACE(KernelContext_GetInput, 90)            \
  PLACE(KernelContext_GetOutput, 91)           \
  PLACE(ReleaseTensorTypeAndShapeInfo, 99)     \
  PLACE(HasSessionConfigEntry, 237)            \
  PLACE(GetSessionConfigEntry, 238)            \
  PLACE(ShapeInferContext_GetInputTypeShape, 268) \
  PLACE(ShapeInferContext_SetOutputTypeShape, 270) \
  PLACE(KernelContext_ParallelFor, 274)
enum Place {
#define SPARSEPRIOR_PLACE(name, place) name = place,
  SPARSEPRIOR_PLACES(SPARSEPRIOR_PLACE)
#undef SPARSEPRIOR_PLACE
};
#ifdef SPARSEPRIOR_ONNXRUNTIME_HEADER
#define SPARSEPRIOR_PLACE(name, place) \
  static_assert(offsetof(OrtApi, name) == place * sizeof(void*), #name " has another place in OrtApi");
SPARSEPRIOR_PLACES(SPARSEPRIOR_PLACE)
#undef SPARSEPRIOR_PLACE
#endif

struct ApiBase {
  Table* (*get)(uint32_t version);  // null for a version that this ONNX Runtime does not have
  const char* (*version)();
};

// OrtCustomOp of version 17. ONNX Runtime reads as much of it as `version` says.
struct Operator {
  uint32_t version;
  void* (*create)(const Operator*, Table*, const KernelInfo*);
  const char* (*name)(const Operator*);
  const char* (*provider)(const Operator*);
  int (*input_type)(const Operator*, size_t);
  size_t (*inputs)(const Operator*);
  int (*output_type)(const Operator*, size_t);
  size_t (*outputs)(const Operator*);
  void (*compute)(void*, Context*);
  void (*destroy)(void*);
  int (*input_is)(const Operator*, size_t);
  int (*output_is)(const Operator*, size_t);
  int (*input_memory)(const Operator*, size_t);
  int (*unused[4])(const Operator*);  // of inputs and outputs of any number
  Status* (*create_or_fail)(const Operator*, Table*, const KernelInfo*, void**);
  Status* (*compute_or_fail)(void*, Context*);
  Status* (*output_shape)(const Operator*, ShapeContext*);
  int (*first_version)(const Operator*);
  int (*last_version)(const Operator*);
};
static_assert(sizeof(Operator) == 22 * sizeof(void*));
#ifdef SPARSEPRIOR_ONNXRUNTIME_HEADER
static_assert(offsetof(OrtCustomOp, InferOutputShapeFn) == offsetof(Operator, output_shape));
#endif

constexpr int REQUIRED = 0, OPTIONAL = 1;  // of OrtCustomOpInputOutputCharacteristic
constexpr int FAIL = 1;                    // of OrtErrorCode

Table* api;  // the same for all sessions of a process

// The number of a type in ONNX.
int onnx_type(Dtype dtype) { return dtype == Dtype::float32 ? 1 : dtype == Dtype::int32 ? 6 : 7; }

// Throws what ONNX Runtime returned; `guarded` gives it back.
void succeed(Status* status) {
  if (status) throw status;
}
template <int place, typename... Arguments>
void ask(Arguments... arguments) {
  succeed(call<place, Status*>(api, arguments...));
}
Status* failed(Table* table, const std::string& message) {
  return call<CreateStatus, Status*>(table, FAIL, message.c_str());
}
template <typename F>
Status* guarded(const F& run) {
  try {
    run();
    return nullptr;
  } catch (Status* status) {
    return status;
  } catch (const std::exception& error) {
    return failed(api, error.what());
  }
}

// ---- threads --------------------------------------------------------------------------------------------------------

// A session's own threads do the work, and nothing tells how many it has: an entry of its options does, or else the number of
// processors that this process may use.
constexpr const char* THREADS = "hf_sparseprior.threads";

int64_t usable_processors() {
#if defined(__linux__)
  cpu_set_t own;
  if (sched_getaffinity(0, sizeof own, &own) == 0) return std::max(1, CPU_COUNT(&own));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

int64_t threads_of(const Options* options) {
  int there = 0;
  ask<HasSessionConfigEntry>(options, THREADS, &there);
  if (!there) return usable_processors();
  char text[32];
  size_t size = sizeof text;
  ask<GetSessionConfigEntry>(options, THREADS, (char*)text, &size);
  char* end;
  const long threads = std::strtol(text, &end, 10);
  if (*end || threads < 1 || threads > 4096) {
    throw std::runtime_error(std::string(THREADS) + "='" + text + "' must be a whole number from 1 to 4096");
  }
  return threads;
}

// Of the call that this thread is in.
thread_local const Context* running;
thread_local int64_t running_threads;

// ---- an operator ----------------------------------------------------------------------------------------------------

// An operator of the sessions with so many threads.
struct OwnOperator : Operator {
  const ProgramOperator* what;
  int64_t threads;
};
const ProgramOperator& what(const Operator* own) { return *((const OwnOperator*)own)->what; }

struct Kernel {
  const OwnOperator* own;
  Attributes attributes;
};

Status* create(const Operator* own, Table*, const KernelInfo* info, void** kernel) {
  return guarded([&] {
    auto made = std::make_unique<Kernel>(Kernel{(const OwnOperator*)own, {}});
    for (const auto& [name, field] : what(own).integers) {
      ask<KernelInfoGetAttribute_int64>(info, name, &(made->attributes.*field));
    }
    for (const auto& [name, field] : what(own).floats) {
      ask<KernelInfoGetAttribute_float>(info, name, &(made->attributes.*field));
    }
    *kernel = made.release();
  });
}

std::vector<int64_t> sizes_of(const TypeAndShape* shape) {
  size_t count;
  ask<GetDimensionsCount>(shape, &count);
  std::vector<int64_t> sizes(count);
  ask<GetDimensions>(shape, sizes.data(), count);
  return sizes;
}

void compute(const Kernel& kernel, Context* context) {
  const ProgramOperator& own = *kernel.own->what;
  std::vector<Tensor> tensors;
  tensors.reserve(own.inputs.size());
  std::vector<const Tensor*> inputs(own.inputs.size());
  std::vector<std::vector<int64_t>> shapes(own.inputs.size());
  size_t given;
  ask<KernelContext_GetInputCount>((const Context*)context, &given);
  for (size_t i = 0; i < std::min(given, inputs.size()); ++i) {
    const Value* value;
    ask<KernelContext_GetInput>((const Context*)context, i, &value);
    if (!value) continue;
    TypeAndShape* shape;
    void* data;
    ask<GetTensorMutableData>((Value*)value, &data);
    ask<GetTensorTypeAndShape>(value, &shape);
    shapes[i] = sizes_of(shape);
    call<ReleaseTensorTypeAndShapeInfo, void>(api, shape);
    inputs[i] = &tensors.emplace_back(data, shapes[i], own.inputs[i].dtype);
  }
  check_ranks(own, shapes);
  const std::vector<int64_t> sizes = own.shape(shapes, kernel.attributes);
  Value* output;
  void* data;
  ask<KernelContext_GetOutput>(context, size_t{0}, sizes.data(), sizes.size(), &output);
  ask<GetTensorMutableData>(output, &data);
  running = context;
  running_threads = kernel.own->threads;
  own.run(inputs, kernel.attributes, data);
}

Status* infer_first_shape(const Operator*, ShapeContext* context) {
  return guarded([&] {
    TypeAndShape* shape;  // the context's: released here, it would be freed twice
    ask<ShapeInferContext_GetInputTypeShape>((const ShapeContext*)context, size_t{0}, &shape);
    ask<ShapeInferContext_SetOutputTypeShape>((const ShapeContext*)context, size_t{0}, (const TypeAndShape*)shape);
  });
}

int none(const Operator*) { return 0; }

OwnOperator make(const ProgramOperator& own, int64_t threads) {
  OwnOperator made{};
  made.version = VERSION;
  made.name = [](const Operator* own) { return what(own).name; };
  made.provider = [](const Operator*) { return "CPUExecutionProvider"; };
  made.input_type = [](const Operator* own, size_t i) { return onnx_type(what(own).inputs[i].dtype); };
  made.inputs = [](const Operator* own) { return what(own).inputs.size(); };
  made.output_type = [](const Operator* own, size_t) { return onnx_type(what(own).output); };
  made.outputs = [](const Operator*) { return size_t{1}; };
  made.destroy = [](void* kernel) { delete (Kernel*)kernel; };
  made.input_is = [](const Operator* own, size_t i) { return what(own).inputs[i].optional ? OPTIONAL : REQUIRED; };
  made.output_is = [](const Operator*, size_t) { return REQUIRED; };
  made.input_memory = [](const Operator*, size_t) { return 0; };  // where the provider computes
  std::fill(std::begin(made.unused), std::end(made.unused), none);
  made.create_or_fail = create;
  made.compute_or_fail = [](void* kernel, Context* context) {
    return guarded([&] { compute(*(const Kernel*)kernel, context); });
  };
  made.output_shape = own.shape == sparseprior::shape_of_first ? infer_first_shape : nullptr;
  made.first_version = [](const Operator*) { return sparseprior::DOMAIN_VERSION; };
  made.last_version = [](const Operator*) { return INT32_MAX; };
  made.what = &own;
  made.threads = threads;
  return made;
}

// The operators for sessions with so many threads. Sessions keep the address, so it lives as long as the process.
Domain* domain_of(int64_t threads) {
  static std::mutex one_at_a_time;
  static auto& made = *new std::map<int64_t, Domain*>;
  const std::lock_guard lock(one_at_a_time);
  if (const auto found = made.find(threads); found != made.end()) return found->second;
  Domain* domain;
  ask<CreateCustomOpDomain>(sparseprior::DOMAIN_NAME, &domain);
  for (const ProgramOperator& each : sparseprior::program_operators()) {
    ask<CustomOpDomain_Add>(domain, (const Operator*)new OwnOperator(make(each, threads)));
  }
  return made[threads] = domain;
}

}  // namespace

namespace sparseprior {

int64_t parallel_threads() { return running_threads; }

void run_parallel(
    int64_t count, int64_t grain, void (*work)(const void* context, int64_t begin, int64_t end), const void* context) {
  struct Call {
    int64_t count, parts;
    void (*work)(const void*, int64_t, int64_t);
    const void* context;
  } call{count, std::max<int64_t>(1, std::min(parallel_threads(), count / grain)), work, context};
  if (call.parts == 1) return work(context, 0, count);
  void (*run)(void*, size_t) = [](void* own, size_t part) {
    const Call& call = *(const Call*)own;
    call.work(call.context, call.count * part / call.parts, call.count * (part + 1) / call.parts);
  };
  ask<KernelContext_ParallelFor>(running, run, (size_t)call.parts, size_t{0}, (void*)&call);
}

}  // namespace sparseprior

// What ONNX Runtime calls when the library is registered.
extern "C" __attribute__((visibility("default"))) Status* RegisterCustomOps(Options* options, const ApiBase* base) {
  api = base->get(VERSION);
  if (!api) {
    return failed(base->get(1), std::string("hf_sparseprior's operators need ONNX Runtime 1.17 or newer, not ") + base->version());
  }
  return guarded([&] { ask<AddCustomOpDomain>(options, domain_of(threads_of(options))); });
}

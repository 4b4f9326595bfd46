// The operators for OpenVINO's CPU, as operations of its own. OpenVINO's interface is C++, so a library is compiled against the
// headers of the installed release and fits that one alone.

#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/frontend/onnx/extension/op.hpp>
#include <openvino/op/op.hpp>

#include "kernels.h"
#include "program_operators.h"

namespace sparseprior {

// The plugin calls an operation within its arena of threads, of which there are as many as INFERENCE_NUM_THREADS says.
int64_t parallel_threads() { return tbb::this_task_arena::max_concurrency(); }

void run_parallel(
    int64_t count, int64_t grain, void (*work)(const void* context, int64_t begin, int64_t end), const void* context) {
  const int64_t parts = std::max<int64_t>(1, std::min(parallel_threads(), count / grain));
  if (parts == 1) return work(context, 0, count);
  tbb::parallel_for(
      int64_t{0}, parts, [&](int64_t part) { work(context, count * part / parts, count * (part + 1) / parts); },
      tbb::static_partitioner());
}

namespace {

ov::element::Type type_of(Dtype dtype) {
  return dtype == Dtype::float32 ? ov::element::f32 : dtype == Dtype::int32 ? ov::element::i32 : ov::element::i64;
}

}  // namespace

// The operator of a place in the list. Inputs that are left out are the last ones.
template <size_t place>
class Operation : public ov::op::Op {
 public:
  static const ProgramOperator& what() { return program_operators()[place]; }
  static const ov::DiscreteTypeInfo& get_type_info_static() {
    static ov::DiscreteTypeInfo info = [] {
      ov::DiscreteTypeInfo made{what().name, DOMAIN_NAME, &ov::op::Op::get_type_info_static()};
      made.hash();
      return made;
    }();
    return info;
  }
  const ov::DiscreteTypeInfo& get_type_info() const override { return get_type_info_static(); }

  Operation() = default;
  Operation(const ov::OutputVector& inputs, const Attributes& attributes) : Op(inputs), attributes_(attributes) {
    constructor_validate_and_infer_types();
  }

  void validate_and_infer_types() override {
    const size_t count = get_input_size(), most = what().inputs.size();
    NODE_VALIDATION_CHECK(this, count <= most && (count == most || what().inputs[count].optional), "inputs are missing");
    std::vector<std::vector<int64_t>> shapes(count);
    for (size_t i = 0; i < count; ++i) {
      const auto& input = what().inputs[i];
      const ov::PartialShape& shape = get_input_partial_shape(i);
      NODE_VALIDATION_CHECK(
          this, get_input_element_type(i).compatible(type_of(input.dtype)), input.name, " must be ", type_of(input.dtype));
      NODE_VALIDATION_CHECK(this, shape.rank().compatible(input.axes), input.name, " must have ", input.axes, " axes");
      for (size_t axis = 0; axis < input.axes; ++axis) {
        const bool known = shape.rank().is_static() && shape[axis].is_static();
        shapes[i].push_back(known ? shape[axis].get_length() : -1);
      }
    }
    std::vector<ov::Dimension> sizes;
    for (const int64_t size : what().shape(shapes, attributes_)) sizes.emplace_back(size);
    set_output_type(0, type_of(what().output), ov::PartialShape(sizes));
  }

  std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
    return std::make_shared<Operation>(inputs, attributes_);
  }

  bool visit_attributes(ov::AttributeVisitor& visitor) override {
    for (const auto& [name, field] : what().integers) visitor.on_attribute(name, attributes_.*field);
    for (const auto& [name, field] : what().floats) visitor.on_attribute(name, attributes_.*field);
    return true;
  }

  bool has_evaluate() const override { return true; }

  bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
    std::vector<Tensor> tensors;
    tensors.reserve(inputs.size());
    std::vector<std::vector<int64_t>> shapes;
    std::vector<const Tensor*> given(what().inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      const ov::Shape& shape = inputs[i].get_shape();
      shapes.emplace_back(shape.begin(), shape.end());
      given[i] = &tensors.emplace_back(inputs[i].data(), shapes[i], what().inputs[i].dtype);
    }
    check_ranks(what(), shapes);
    const std::vector<int64_t> sizes = what().shape(shapes, attributes_);
    outputs[0].set_shape(ov::Shape(sizes.begin(), sizes.end()));
    what().run(given, attributes_, outputs[0].data());
    return true;
  }

 private:
  Attributes attributes_;
};

namespace {

// Each operation as model.xml names it, and as an ONNX file does.
template <size_t... places>
std::vector<ov::Extension::Ptr> extensions(std::index_sequence<places...>) {
  std::vector<ov::Extension::Ptr> all;
  ((all.push_back(std::make_shared<ov::OpExtension<Operation<places>>>()),
    all.push_back(std::make_shared<ov::frontend::onnx::OpExtension<Operation<places>>>(
        Operation<places>::what().name, DOMAIN_NAME))),
   ...);
  return all;
}

}  // namespace
}  // namespace sparseprior

OPENVINO_CREATE_EXTENSIONS(sparseprior::extensions(std::make_index_sequence<sparseprior::NUM_PROGRAM_OPERATORS>()));

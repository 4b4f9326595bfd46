// The operators, one source file for each kind. The headers that make them known to torch are most of what there is to
// compile, so operators_cpu.cpp alone includes them; the other files include ATen/core/Tensor.h in place of ATen/ATen.h
// and call methods of tensors only.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace sparseprior {

using at::Tensor;
using std::optional;

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> diagonal_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets, const Tensor& counts, int64_t prefix,
    double scale, bool zero_fill, const optional<Tensor>& pair_weights, const optional<Tensor>& pair_begin,
    const optional<Tensor>& prefix_weight, const optional<Tensor>& self_weight, const optional<Tensor>& drop, bool keep);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> diagonal_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& offsets,
    const Tensor& counts, int64_t prefix, double scale, bool zero_fill, const optional<Tensor>& pair_weights,
    const optional<Tensor>& pair_begin, const optional<Tensor>& prefix_weight, const optional<Tensor>& self_weight,
    const optional<Tensor>& drop, const Tensor& probs, const Tensor& logits, const Tensor& floors, const Tensor& rows);

Tensor decayed_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions, const Tensor& log_gamma,
    const Tensor& alpha, const Tensor& prefix_gamma, int64_t prefix, double scale);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> decayed_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions,
    const Tensor& log_gamma, const Tensor& alpha, const Tensor& prefix_gamma, int64_t prefix, double scale);

Tensor listed_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const optional<Tensor>& factor,
    const optional<Tensor>& prefix_factor, int64_t prefix, double scale);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> listed_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys,
    const optional<Tensor>& factor, const optional<Tensor>& prefix_factor, int64_t prefix, double scale);

Tensor predicted_keys(
    const Tensor& coefficients, const Tensor& basis, int64_t prefix, int64_t budget, double threshold);

}  // namespace sparseprior

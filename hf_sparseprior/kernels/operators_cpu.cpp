// Makes the operators on CPUs known to torch.

#include <torch/library.h>

#include "operators.h"

namespace sparseprior {
namespace {

TORCH_LIBRARY_FRAGMENT(hf_sparseprior, m) {
  m.def(
      "diagonal_forward(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor counts, int prefix, float scale, "
      "bool zero_fill, Tensor? pair_weights, Tensor? pair_begin, Tensor? prefix_weight, Tensor? self_weight, "
      "Tensor? drop, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "diagonal_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor offsets, Tensor counts, "
      "int prefix, float scale, bool zero_fill, Tensor? pair_weights, Tensor? pair_begin, Tensor? prefix_weight, "
      "Tensor? self_weight, Tensor? drop, Tensor probs, Tensor logits, Tensor floors, Tensor rows) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "decayed_forward(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor log_gamma, Tensor alpha, "
      "Tensor prefix_gamma, int prefix, float scale) -> Tensor");
  m.def(
      "decayed_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor positions, Tensor log_gamma, Tensor alpha, "
      "Tensor prefix_gamma, int prefix, float scale) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "listed_forward(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor? factor, Tensor? prefix_factor, int prefix, "
      "float scale) -> Tensor");
  m.def(
      "listed_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor keys, Tensor? factor, "
      "Tensor? prefix_factor, int prefix, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("predicted_keys(Tensor coefficients, Tensor basis, int prefix, int budget, float threshold) -> Tensor");
}

TORCH_LIBRARY_IMPL(hf_sparseprior, CPU, m) {
  m.impl("diagonal_forward", diagonal_forward);
  m.impl("diagonal_backward", diagonal_backward);
  m.impl("decayed_forward", decayed_forward);
  m.impl("decayed_backward", decayed_backward);
  m.impl("listed_forward", listed_forward);
  m.impl("listed_backward", listed_backward);
  m.impl("predicted_keys", predicted_keys);
}

}  // namespace
}  // namespace sparseprior

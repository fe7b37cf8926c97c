#include "parameters.h"

#include <iterator>

namespace jax_r2p {
namespace {

#define R2P_PARAMETER(name, size) ParameterInfo{#name, size},
constexpr ParameterInfo kForward[] = {
#include "parameters_forward.def"
};
constexpr ParameterInfo kBackward[] = {
#include "parameters_backward.def"
};
#undef R2P_PARAMETER

}  // namespace

ParameterList ParametersOf(R2pRole role) {
  return role == R2P_BACKWARD ? ParameterList{kBackward, std::size(kBackward)}
                              : ParameterList{kForward, std::size(kForward)};
}

const char* RoleName(R2pRole role) { return role == R2P_BACKWARD ? "backward" : "forward"; }

}  // namespace jax_r2p

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
constexpr ParameterInfo kPreprocess[] = {
#include "parameters_preprocess.def"
};
#undef R2P_PARAMETER

}  // namespace

ParameterList ParametersOf(R2pRole role) {
  switch (role) {
    case R2P_FORWARD: break;
    case R2P_BACKWARD: return ParameterList{kBackward, std::size(kBackward)};
    case R2P_PREPROCESS: return ParameterList{kPreprocess, std::size(kPreprocess)};
  }
  return ParameterList{kForward, std::size(kForward)};
}

const char* RoleName(R2pRole role) {
  switch (role) {
    case R2P_FORWARD: break;
    case R2P_BACKWARD: return "backward";
    case R2P_PREPROCESS: return "preprocess";
  }
  return "forward";
}

}  // namespace jax_r2p

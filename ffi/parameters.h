// What a kernel's parameters are made of, and the lists of them that the cubin build reads too.

#ifndef JAX_R2P_FFI_PARAMETERS_H_
#define JAX_R2P_FFI_PARAMETERS_H_

#include <cstddef>
#include <cstdint>

#include "c_api.h"
#include "tensor.h"

namespace jax_r2p {

struct ParameterInfo {
  const char* name;
  size_t size;  // bytes
};

// In the kernel's order.
struct ParameterList {
  const ParameterInfo* entries;
  size_t count;
};

// The parameters of every kernel of a role.
ParameterList ParametersOf(R2pRole role);

// "forward", "backward" or "preprocess", for errors.
const char* RoleName(R2pRole role);

// (rows, head dim, heads, batch) of an array, as the kernels take them.
struct Dims {
  int32_t rows;
  int32_t head_dim;
  int32_t heads;
  int32_t batch;
};

// Of a number that has been found to be in 0..2^31-1.
constexpr int32_t Narrow(int64_t checked) { return static_cast<int32_t>(checked); }

inline Dims MakeDims(const Tensor& tensor) {
  return Dims{Narrow(tensor.dims[1]), Narrow(tensor.dims[3]), Narrow(tensor.dims[2]), Narrow(tensor.dims[0])};
}

}  // namespace jax_r2p

#endif  // JAX_R2P_FFI_PARAMETERS_H_

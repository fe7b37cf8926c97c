// One call of the attention-preprocess kernel: checks, parameters, grid, launch.

#ifndef JAX_R2P_FFI_PREPROCESS_H_
#define JAX_R2P_FFI_PREPROCESS_H_

#include <cuda.h>

#include <string_view>

#include "status.h"
#include "tensor.h"

namespace jax_r2p {

// What R2pPreprocess in c_api.h says of each field holds here too.
struct PreprocessRequest {
  std::string_view variant;
  Tensor out;
  Tensor dout;
  Tensor lse;
  Tensor dlse;
  Tensor query_lengths;
  Tensor lse_base2;
  Tensor delta;
  Tensor sums;
  Tensor marks;
  CUstream stream;
};

// Checks the request and enqueues the kernel on its stream. Does not wait for it.
// Errors: INVALID_ARGUMENT naming the argument, expected and got; those of FindVariant and WithKernel.
Status LaunchPreprocess(const PreprocessRequest& request);

}  // namespace jax_r2p

#endif  // JAX_R2P_FFI_PREPROCESS_H_

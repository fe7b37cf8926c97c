// One call of the attention-backward kernel: checks, parameters, grid, launch.

#ifndef JAX_R2P_FFI_BACKWARD_H_
#define JAX_R2P_FFI_BACKWARD_H_

#include <cstdint>

#include "attention.h"
#include "status.h"
#include "tensor.h"

namespace jax_r2p {

// What R2pBackward in c_api.h says of each field holds here too.
struct BackwardRequest {
  AttentionCall call;
  Tensor dout;
  Tensor lse;
  Tensor delta;
  Tensor dquery_factor;
  Tensor sums_zeros;
  Tensor marks_zeros;
  Tensor dquery;
  Tensor dkey;
  Tensor dvalue;
  Tensor sums;
  Tensor marks;
  int64_t together;
  int64_t lag;
  bool deterministic;
};

// Checks the request and enqueues the kernel on its stream. Does not wait for it.
// Errors: INVALID_ARGUMENT naming the argument, expected and got; those of FindVariant and WithKernel.
Status LaunchBackward(const BackwardRequest& request);

}  // namespace jax_r2p

#endif  // JAX_R2P_FFI_BACKWARD_H_

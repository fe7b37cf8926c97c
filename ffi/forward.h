// One call of the attention-forward kernel: checks, parameters, grid, launch.

#ifndef JAX_R2P_FFI_FORWARD_H_
#define JAX_R2P_FFI_FORWARD_H_

#include "attention.h"
#include "status.h"
#include "tensor.h"

namespace jax_r2p {

// What R2pLaunch in c_api.h says of each field holds here too.
struct ForwardRequest {
  AttentionCall call;
  Tensor out;
  Tensor lse;
};

// Checks the request and enqueues the kernel on its stream. Does not wait for it.
// Errors: INVALID_ARGUMENT naming the argument, expected and got; those of FindVariant and WithKernel.
Status LaunchForward(const ForwardRequest& request);

}  // namespace jax_r2p

#endif  // JAX_R2P_FFI_FORWARD_H_

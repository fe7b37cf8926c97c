// Enqueuing a kernel, whatever it computes. Knows nothing of XLA.

#ifndef JAX_R2P_FFI_LAUNCH_H_
#define JAX_R2P_FFI_LAUNCH_H_

#include <cuda.h>

#include <cstdint>
#include <string_view>

#include "cubin.h"
#include "driver.h"
#include "status.h"

namespace jax_r2p {

// Loads the variant's kernel in the context of `stream`, so that a later launch, which may run while the
// stream is being captured into a graph, finds it there.
Status Load(std::string_view variant, CUstream stream);

// Runs `body(driver, kernel)`, which returns a Status, with the slot's kernel loaded in the context of
// `stream`, and that context current. Errors: those of GetDriver and the driver calls.
template <typename Body>
Status WithKernel(VariantSlot* slot, CUstream stream, Body&& body) {
  const Driver* driver = nullptr;
  CUcontext context = nullptr;
  R2P_RETURN_IF_ERROR(GetDriver(&driver));
  R2P_RETURN_IF_ERROR(ContextOf(*driver, stream, &context));
  return InContext(*driver, context, [&]() -> Status {
    LoadedKernel kernel;
    R2P_RETURN_IF_ERROR(GetKernel(*driver, context, slot, &kernel));
    return body(*driver, kernel);
  });
}

// Enqueues the kernel with `blocks` thread blocks, 1..2^31-1. `parameters` are the addresses of its
// parameters in its order; they are read before this returns. Does not wait for the kernel.
Status Enqueue(const Driver& driver, const LoadedKernel& kernel, const Variant& variant, int64_t blocks,
               CUstream stream, void** parameters);

// How many kernels Enqueue has enqueued in this process.
uint64_t LaunchCount();

}  // namespace jax_r2p

#endif  // JAX_R2P_FFI_LAUNCH_H_

// The table of kernel variants and their loaded kernels.

#ifndef JAX_R2P_FFI_CUBIN_H_
#define JAX_R2P_FFI_CUBIN_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "driver.h"
#include "status.h"

namespace jax_r2p {

// One kernel and what a launch has to know of it; the fields are those of R2pVariant.
struct Variant {
  std::string name;
  std::string entry;
  std::string cubin;
  R2pRole role = R2P_FORWARD;
  int32_t dtype = 0;
  int32_t head_dim = 0;
  int32_t value_head_dim = 0;
  int32_t tile_m = 0;
  int32_t tile_n = 0;
  int32_t threads = 0;
  int32_t shared_memory = 0;
  int32_t min_blocks = 0;
  bool is_causal = false;
};

// A kernel in one context, and how many SMs the context's device has.
struct LoadedKernel {
  CUfunction function = nullptr;
  int32_t multiprocessors = 0;
};

struct VariantSlot;  // a variant with its loaded kernels

// Adds a variant whose fields have been checked. Adding an equal one again changes nothing.
// Error: INVALID_ARGUMENT when the name stands for something else already.
Status AddVariant(Variant variant);

// Adds a name that has no usable kernel; looking it up fails with `message`. Same rule for a second call.
Status AddBrokenVariant(std::string name, std::string message);

// Finds a variant. The slot lives as long as the process.
// Errors: NOT_FOUND listing the known names; FAILED_PRECONDITION with the message of a broken variant.
Status FindVariant(std::string_view name, VariantSlot** slot);

const Variant& GetVariant(const VariantSlot& slot);

// The kernel in `context`, which must be the current one. The first call for a context loads it there, once
// even when several threads ask together; later calls only read the cache.
Status GetKernel(const Driver& driver, CUcontext context, VariantSlot* slot, LoadedKernel* kernel);

// How many kernels GetKernel has loaded in this process.
uint64_t LoadCount();

}  // namespace jax_r2p

#endif  // JAX_R2P_FFI_CUBIN_H_

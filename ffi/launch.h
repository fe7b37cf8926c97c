// One call of the attention-forward kernel: checks, parameters, grid, launch. Knows nothing of XLA.

#ifndef JAX_R2P_FFI_LAUNCH_H_
#define JAX_R2P_FFI_LAUNCH_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "status.h"

namespace jax_r2p {

// "No bound" among window ends, and the most query rows and keys a call may have: far from where 32-bit sums
// of a row, a key and a window end would overflow.
constexpr int32_t kUnbounded = int32_t{1} << 29;

// A view of one array: device address, element type (R2pDtype) and row-major shape.
struct Tensor {
  const char* name;  // for errors
  void* data;
  int32_t dtype;
  const int64_t* dims;
  size_t rank;
};

// What R2pLaunch in c_api.h says of each field holds here too.
struct LaunchRequest {
  std::string_view variant;
  Tensor query;
  Tensor key;
  Tensor value;
  Tensor scale;
  Tensor query_lengths;
  Tensor key_lengths;
  Tensor out;
  Tensor lse;
  int32_t window_left;
  int32_t window_right;
  int64_t kv_repeat;
  int64_t kv_inner;
  CUstream stream;
};

// Loads the variant's kernel in the context of `stream`, so that a later Launch, which may run while the
// stream is being captured into a graph, finds it there.
Status Load(std::string_view variant, CUstream stream);

// Checks the request and enqueues the kernel on its stream. Does not wait for it.
// Errors: INVALID_ARGUMENT naming the argument, expected and got; those of FindVariant, GetDriver and the
// driver calls.
Status Launch(const LaunchRequest& request);

// How many kernels Launch has enqueued in this process.
uint64_t LaunchCount();

// The number of parameters of a kernel, and of parameter `index` (in the kernel's order) the name and the
// size in bytes.
size_t ParameterCount();
const char* ParameterName(size_t index);
size_t ParameterSize(size_t index);

}  // namespace jax_r2p

#endif  // JAX_R2P_FFI_LAUNCH_H_

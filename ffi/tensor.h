// Views of the arrays of a call, and the checks of a single array.

#ifndef JAX_R2P_FFI_TENSOR_H_
#define JAX_R2P_FFI_TENSOR_H_

#include <cstddef>
#include <cstdint>

#include "status.h"

namespace jax_r2p {

// Of addresses, in bytes.
constexpr int64_t kVectorAlignment = 16;  // TMA's, and that of the kernels' vector loads
constexpr int64_t kScalarAlignment = 4;   // of a float32 or int32 that is read by itself

// A view of one array: device address, element type (R2pDtype) and row-major shape.
struct Tensor {
  const char* name;  // for errors
  void* data;
  int32_t dtype;
  const int64_t* dims;
  size_t rank;
};

// Error of these: INVALID_ARGUMENT naming the array, expected and got.

// Element type, rank and address; and that no dimension is 0.
Status CheckTensor(const Tensor& tensor, int32_t dtype, size_t rank, int64_t alignment);

// `expected` has as many entries as the tensor, whose rank has been checked; `rule` says why those.
Status CheckShape(const Tensor& tensor, const int64_t* expected, const char* rule);

// Both, for an array of one dimension which may also be empty: that stands for one that is not given.
Status CheckOptional(const Tensor& tensor, int32_t dtype, int64_t size, const char* rule);

bool IsEmpty(const Tensor& tensor);

// The address; null for an empty array, for which XLA may pass any.
void* DataOrNull(const Tensor& tensor);

}  // namespace jax_r2p

#endif  // JAX_R2P_FFI_TENSOR_H_

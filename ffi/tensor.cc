#include "tensor.h"

#include <algorithm>
#include <string>

namespace jax_r2p {
namespace {

std::string DtypeName(int32_t dtype) {
  switch (dtype) {  // XLA's numbers
    case 1: return "bool";
    case 2: return "int8";
    case 3: return "int16";
    case R2P_S32: return "int32";
    case 5: return "int64";
    case 6: return "uint8";
    case R2P_F16: return "float16";
    case R2P_F32: return "float32";
    case 12: return "float64";
    case R2P_BF16: return "bfloat16";
    default: return Text("element type ", dtype);
  }
}

std::string ShapeText(const int64_t* dims, size_t rank) {
  std::string text = "(";
  for (size_t i = 0; i < rank; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  }
  return text + ")";
}

}  // namespace

Status CheckTensor(const Tensor& tensor, int32_t dtype, size_t rank, int64_t alignment) {
  if (tensor.dtype != dtype) {
    return InvalidArgument(tensor.name, ": expected dtype ", DtypeName(dtype), "; got ",
                           DtypeName(tensor.dtype));
  }
  if (tensor.rank != rank) {
    return InvalidArgument(tensor.name, ": expected rank ", rank, "; got rank ", tensor.rank);
  }
  for (size_t i = 0; i < rank; ++i) {
    if (tensor.dims[i] < 1) {
      return InvalidArgument(tensor.name, ": expected every dimension to be at least 1; got shape ",
                             ShapeText(tensor.dims, rank));
    }
  }
  if (tensor.data == nullptr) {
    return InvalidArgument(tensor.name, ": expected a device address; got a null pointer");
  }
  if (reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(alignment) != 0) {
    return InvalidArgument(tensor.name, ": expected an address that is a multiple of ", alignment, "; got ",
                           tensor.data);
  }
  return Status();
}

Status CheckShape(const Tensor& tensor, const int64_t* expected, const char* rule) {
  if (!std::equal(tensor.dims, tensor.dims + tensor.rank, expected)) {
    return InvalidArgument(tensor.name, ": expected shape ", ShapeText(expected, tensor.rank), ", ", rule,
                           "; got shape ", ShapeText(tensor.dims, tensor.rank));
  }
  return Status();
}

Status CheckOptional(const Tensor& tensor, int32_t dtype, int64_t size, const char* rule) {
  if (IsEmpty(tensor) && tensor.dtype == dtype) {
    return Status();
  }
  R2P_RETURN_IF_ERROR(CheckTensor(tensor, dtype, 1, kScalarAlignment));
  return CheckShape(tensor, &size, rule);
}

bool IsEmpty(const Tensor& tensor) { return tensor.rank == 1 && tensor.dims[0] == 0; }

void* DataOrNull(const Tensor& tensor) { return IsEmpty(tensor) ? nullptr : tensor.data; }

}  // namespace jax_r2p

#include "tensor_map.h"

namespace jax_r2p {
namespace {

constexpr int64_t kElementSize = 2;                 // bytes
constexpr int64_t kStrideLimit = int64_t{1} << 40;  // bytes; the driver wants strides below it

// a * b, or kStrideLimit where the product is at least that; a and b are positive.
int64_t Product(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) || product > kStrideLimit ? kStrideLimit : product;
}

}  // namespace

Status EncodeTensorMap(const Driver& driver, const Tensor& array, int32_t box_rows, int32_t tile_columns,
                       CUtensorMap* map) {
  const int64_t batch = array.dims[0], rows = array.dims[1], heads = array.dims[2], head_dim = array.dims[3];
  const int64_t head_stride = Product(head_dim, kElementSize);
  const int64_t row_stride = Product(heads, head_stride);
  const int64_t batch_stride = Product(rows, row_stride);
  if (batch_stride >= kStrideLimit) {
    return InvalidArgument(
        array.name,
        ": expected less than 2^40 bytes in one batch entry, which is as far as TMA reaches; got (", rows,
        ", ", heads, ", ", head_dim, ") elements of 2 bytes");
  }
  const CUtensorMapDataType type =
      array.dtype == R2P_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const int32_t box_columns = MapBoxColumns(tile_columns);
  // The order of the kernel's coordinates: column, row, head, batch. Strides are those of all but the first.
  constexpr cuuint32_t kRank = 4;
  const cuuint64_t dims[kRank] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(rows),
                                  static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[kRank - 1] = {static_cast<cuuint64_t>(row_stride),
                                         static_cast<cuuint64_t>(head_stride),
                                         static_cast<cuuint64_t>(batch_stride)};
  const cuuint32_t box[kRank] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1,
                                 1};
  const CUtensorMapSwizzle swizzle =
      box_columns == kMapWideBox ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const cuuint32_t element_strides[kRank] = {1, 1, 1, 1};
  R2P_DRIVER_CALL(driver, cuTensorMapEncodeTiled,
                  Text(array.name, " of shape (", batch, ", ", rows, ", ", heads, ", ", head_dim,
                       ") with boxes of ", box_rows, " rows and ", box_columns, " columns"),
                  map, type, kRank, array.data, dims, strides, box, element_strides,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return Status();
}

}  // namespace jax_r2p

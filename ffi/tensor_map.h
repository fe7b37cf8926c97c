// TMA descriptors ("tensor maps") of the arrays that a kernel loads and stores by tile.

#ifndef JAX_R2P_FFI_TENSOR_MAP_H_
#define JAX_R2P_FFI_TENSOR_MAP_H_

#include <cstdint>

#include "driver.h"
#include "status.h"
#include "tensor.h"

namespace jax_r2p {

// Columns of a box: what the 128- or the 64-byte swizzle of the kernel's shared memory spans, in 2-byte
// elements.
constexpr int32_t kMapWideBox = 64;
constexpr int32_t kMapNarrowBox = 32;
// A kernel whose tile has `width` columns, a multiple of the narrow box, loads and stores it by the widest
// boxes that divide it.
constexpr int32_t MapBoxColumns(int32_t width) {
  return width % kMapWideBox == 0 ? kMapWideBox : kMapNarrowBox;
}
// The most rows that TMA can have in a box.
constexpr int32_t kMapMaxBoxRows = 256;

// Rows of a box where each warpgroup loads or stores its own.
constexpr int32_t kWarpgroupRows = 64;

// Encodes the map of an array (batch, rows, heads, head dim) of bf16 or fp16, which has been checked. Through
// it a kernel whose tiles of the array have `tile_columns` columns moves boxes of `box_rows` rows of one head
// of one batch entry. Elements outside the array read as zero and are not written, so tiles may reach past
// the last row and column. Errors: INVALID_ARGUMENT when a stride is beyond TMA's reach; INTERNAL when the
// driver refuses.
Status EncodeTensorMap(const Driver& driver, const Tensor& array, int32_t box_rows, int32_t tile_columns,
                       CUtensorMap* map);

}  // namespace jax_r2p

#endif  // JAX_R2P_FFI_TENSOR_MAP_H_

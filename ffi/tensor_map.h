// TMA descriptors ("tensor maps") of the arrays that a kernel loads and stores by tile.

#ifndef JAX_R2P_FFI_TENSOR_MAP_H_
#define JAX_R2P_FFI_TENSOR_MAP_H_

#include <cstdint>

#include "driver.h"
#include "status.h"

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

// A row-major array (batch, rows, heads, head_dim) of 2-byte elements in device memory.
struct MapSource {
  const char* name;  // for errors
  void* data;
  CUtensorMapDataType type;
  int64_t batch;
  int64_t rows;
  int64_t heads;
  int64_t head_dim;
};

// Encodes the map through which a kernel moves boxes of `box_rows` rows by `box_columns` columns, a result of
// MapBoxColumns, of one head of one batch row. Elements outside the array read as zero and are not written,
// so tiles may reach past the last row and column. Errors: INVALID_ARGUMENT when a stride is beyond TMA's
// reach; INTERNAL when the driver refuses.
Status EncodeTensorMap(const Driver& driver, const MapSource& source, int32_t box_rows, int32_t box_columns,
                       CUtensorMap* map);

}  // namespace jax_r2p

#endif  // JAX_R2P_FFI_TENSOR_MAP_H_

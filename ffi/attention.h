// What calls of the kernels have in common: those of the forward and of the backward pass their arguments,
// sizes and rules; and all of them some checks.

#ifndef JAX_R2P_FFI_ATTENTION_H_
#define JAX_R2P_FFI_ATTENTION_H_

#include <cuda.h>

#include <cstdint>
#include <limits>
#include <string_view>

#include "cubin.h"
#include "status.h"
#include "tensor.h"

namespace jax_r2p {

// "No bound" among window ends, and the most query rows and keys a call may have: far from where 32-bit sums
// of a row, a key and a window end would overflow.
constexpr int32_t kUnbounded = int32_t{1} << 29;
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// What R2pLaunch in c_api.h says of each field holds here too.
struct AttentionCall {
  std::string_view variant;
  Tensor query;
  Tensor key;
  Tensor value;
  Tensor scale;
  Tensor query_lengths;
  Tensor key_lengths;
  int32_t window_left;
  int32_t window_right;
  int64_t kv_repeat;
  int64_t kv_inner;
  CUstream stream;
};

// The sizes of a call that CheckCall has accepted. Each is in 1..2^31-1.
struct Problem {
  int64_t batch;
  int64_t queries;
  int64_t heads;
  int64_t head_dim;
  int64_t value_head_dim;
  int64_t kv_batch;
  int64_t keys;
  int64_t kv_heads;
  int64_t head_tiles;  // tiles of the variant's tile_m query rows in a head; in all heads at most kUnbounded
};

// Checks that the variant is of `role` and takes the call.
// Error: INVALID_ARGUMENT naming the argument, expected and got.
Status CheckCall(const AttentionCall& call, R2pRole role, const Variant& variant, Problem* problem);

// Checks that the variant is of `role`. Error: INVALID_ARGUMENT naming the role, expected and got.
Status CheckRole(const Variant& variant, R2pRole role);

// Checks that the head dim of an array of rank 4 is a multiple of 16 bytes, and at most `widest` elements.
// Error: INVALID_ARGUMENT naming the array, expected and got.
Status CheckHeadDim(const Tensor& tensor, int64_t widest, const Variant& variant);

// Checks that kernels can number the rows, heads and batch entries of an array of rank 4 that has those of
// query. Error: INVALID_ARGUMENT naming the array, expected and got.
Status CheckSizes(const Tensor& tensor);

// Checks that `value`, called `name` in the error, is in low..high.
// Error: INVALID_ARGUMENT naming it, expected and got.
Status CheckRange(const char* name, int64_t value, int64_t low, int64_t high);

// Sets `blocks` to the number of blocks of `block_rows` rows in one head of array `name`, which has that many
// batch entries and heads. Error: INVALID_ARGUMENT when all heads together have more than `most`.
Status CountBlocks(const char* name, int64_t batch, int64_t heads, int64_t rows, int32_t block_rows,
                   int64_t most, int64_t* blocks);

// The window's ends as the kernels take them.
int32_t WindowLeft(const AttentionCall& call, const Problem& problem);
int32_t WindowRight(const AttentionCall& call, const Problem& problem);

}  // namespace jax_r2p

#endif  // JAX_R2P_FFI_ATTENTION_H_

#include "attention.h"

#include <algorithm>

#include "parameters.h"

namespace jax_r2p {
namespace {

constexpr int64_t kHeadDimMultiple = 8;  // elements; 16 bytes, TMA's unit of a stride

Status CheckSize(const Tensor& tensor, const char* size, int64_t value, int64_t high) {
  // Named only where there is an error: a launch has no time for texts.
  return value >= 1 && value <= high ? Status()
                                     : CheckRange(Text(tensor.name, " ", size).c_str(), value, 1, high);
}

Status CheckSharedKeys(const AttentionCall& call, const Problem& p) {
  // Together these give kv_repeat * kv_inner <= kv_repeat * key's batch == query's batch.
  R2P_RETURN_IF_ERROR(CheckRange("kv_repeat", call.kv_repeat, 1, p.batch));
  R2P_RETURN_IF_ERROR(CheckRange("kv_inner", call.kv_inner, 1, p.batch));
  if (p.kv_batch % call.kv_inner != 0) {
    return InvalidArgument("kv_inner: expected a divisor of key's batch ", p.kv_batch, "; got ",
                           call.kv_inner);
  }
  if (p.batch % call.kv_repeat != 0 || p.batch / call.kv_repeat != p.kv_batch) {
    return InvalidArgument("kv_repeat: expected query's batch ", p.batch, " to be key's batch ", p.kv_batch,
                           " times kv_repeat; got ", call.kv_repeat);
  }
  return Status();
}

}  // namespace

Status CheckCall(const AttentionCall& call, R2pRole role, const Variant& variant, Problem* problem) {
  R2P_RETURN_IF_ERROR(CheckRole(variant, role));
  for (const Tensor* tensor : {&call.query, &call.key, &call.value}) {
    R2P_RETURN_IF_ERROR(CheckTensor(*tensor, variant.dtype, 4, kVectorAlignment));
  }
  R2P_RETURN_IF_ERROR(CheckTensor(call.scale, R2P_F32, 0, kScalarAlignment));

  const int64_t* query = call.query.dims;
  const int64_t* key = call.key.dims;
  *problem = Problem{query[0], query[1], query[2], query[3], call.value.dims[3], key[0], key[1], key[2], 0};
  const Problem& p = *problem;
  const int64_t key_shape[] = {p.kv_batch, p.keys, p.kv_heads, p.head_dim};
  const int64_t value_shape[] = {p.kv_batch, p.keys, p.kv_heads, p.value_head_dim};
  R2P_RETURN_IF_ERROR(CheckShape(call.key, key_shape, "with the head dim of query"));
  R2P_RETURN_IF_ERROR(CheckShape(call.value, value_shape, "as key but for the head dim"));
  R2P_RETURN_IF_ERROR(CheckOptional(call.query_lengths, R2P_S32, p.batch, "the batch of query"));
  R2P_RETURN_IF_ERROR(CheckOptional(call.key_lengths, R2P_S32, p.batch, "the batch of query"));

  R2P_RETURN_IF_ERROR(CheckHeadDim(call.query, variant.head_dim, variant));
  R2P_RETURN_IF_ERROR(CheckHeadDim(call.value, variant.value_head_dim, variant));
  if (p.heads % p.kv_heads != 0) {
    return InvalidArgument("key: expected a number of heads that divides the ", p.heads,
                           " heads of query; got ", p.kv_heads);
  }
  R2P_RETURN_IF_ERROR(CheckSizes(call.query));
  R2P_RETURN_IF_ERROR(CheckRange("key rows", p.keys, 1, kUnbounded));
  R2P_RETURN_IF_ERROR(CheckRange("window_left", call.window_left, 0, kUnbounded));
  R2P_RETURN_IF_ERROR(CheckRange("window_right", call.window_right, 0, kUnbounded));
  R2P_RETURN_IF_ERROR(CheckSharedKeys(call, p));
  return CountBlocks("query", p.batch, p.heads, p.queries, variant.tile_m, kUnbounded, &problem->head_tiles);
}

Status CheckRole(const Variant& variant, R2pRole role) {
  if (variant.role != role) {
    return InvalidArgument("variant: expected a ", RoleName(role), " kernel; got the ",
                           RoleName(variant.role), " kernel '", variant.name, "'");
  }
  return Status();
}

Status CheckHeadDim(const Tensor& tensor, int64_t widest, const Variant& variant) {
  const int64_t head_dim = tensor.dims[3];
  if (head_dim % kHeadDimMultiple != 0 || head_dim > widest) {
    return InvalidArgument(tensor.name, ": expected a head dim that is a multiple of ", kHeadDimMultiple,
                           ", at most ", widest, " for variant '", variant.name, "'; got ", head_dim);
  }
  return Status();
}

Status CheckSizes(const Tensor& tensor) {
  const int64_t batch = tensor.dims[0], heads = tensor.dims[2];
  R2P_RETURN_IF_ERROR(CheckSize(tensor, "rows", tensor.dims[1], kUnbounded));
  R2P_RETURN_IF_ERROR(CheckSize(tensor, "heads", heads, kMaxInt32));
  R2P_RETURN_IF_ERROR(CheckSize(tensor, "batch", batch, kMaxInt32));
  // The kernels number the (batch, head) pairs in 32 bits.
  if (batch > kUnbounded / heads) {
    return InvalidArgument(tensor.name, ": expected batch times heads to be at most ", kUnbounded, "; got ",
                           batch, " times ", heads);
  }
  return Status();
}

Status CheckRange(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    return InvalidArgument(name, ": expected ", low, "..", high, "; got ", value);
  }
  return Status();
}

Status CountBlocks(const char* name, int64_t batch, int64_t heads, int64_t rows, int32_t block_rows,
                   int64_t most, int64_t* blocks) {
  *blocks = rows / block_rows + (rows % block_rows != 0 ? 1 : 0);
  if (*blocks > most / (batch * heads)) {
    return InvalidArgument(name, ": expected batch times heads times blocks of ", block_rows,
                           " rows to be at most ", most, "; got ", batch, " times ", heads, " times ",
                           *blocks);
  }
  return Status();
}

// Ends that far off hide no key, and the kernels' sums with smaller ones stay far from overflow.
int32_t WindowLeft(const AttentionCall& call, const Problem& problem) {
  return Narrow(std::min<int64_t>(call.window_left, problem.keys));
}
int32_t WindowRight(const AttentionCall& call, const Problem& problem) {
  return Narrow(std::min<int64_t>(call.window_right, problem.queries));
}

}  // namespace jax_r2p

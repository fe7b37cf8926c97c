#include "backward.h"

#include "cubin.h"
#include "driver.h"
#include "launch.h"
#include "parameters.h"
#include "tensor_map.h"

namespace jax_r2p {
namespace {

// What the kernel receives; a field per entry of parameters_backward.def, which fixes the order.
struct Parameters {
  CUtensorMap query_map;
  CUtensorMap key_map;
  CUtensorMap value_map;
  CUtensorMap dout_map;
  CUtensorMap dkey_map;
  CUtensorMap dvalue_map;
  Dims query_dims;
  Dims key_dims;
  Dims value_dims;
  Dims dout_dims;
  Dims dkey_dims;
  Dims dvalue_dims;
  void* dquery;
  void* lse;
  void* delta;
  void* counters;
  void* scale;
  void* query_lengths;
  void* key_lengths;
  int32_t window_left;
  int32_t window_right;
  int32_t group;
  int32_t kv_repeat;
  int32_t kv_inner;
};

#define R2P_PARAMETER(name, size) \
  static_assert(sizeof(Parameters::name) == (size), "parameters_backward.def: wrong size of " #name);
#include "parameters_backward.def"
#undef R2P_PARAMETER

// The kernel adds to the result, so it has to be the operand that holds zeros.
Status CheckAlias(const Tensor& result, const Tensor& zeros) {
  if (result.data != zeros.data) {
    return InvalidArgument(result.name, ": expected the address of ", zeros.name, ", ", zeros.data, "; got ",
                           result.data);
  }
  return Status();
}

// Sums over tiles of query rows, which the kernel keeps in the order of its registers.
Status CheckSums(const BackwardRequest& request, const Variant& variant, const Problem& p) {
  const int64_t shape[] = {p.batch, p.heads, p.head_tiles, int64_t{variant.tile_m} * variant.head_dim};
  for (const Tensor* tensor : {&request.dquery_zeros, &request.dquery}) {
    R2P_RETURN_IF_ERROR(CheckTensor(*tensor, R2P_F32, 4, kVectorAlignment));
    R2P_RETURN_IF_ERROR(CheckShape(*tensor, shape, "(batch, heads, tiles, elements of a tile) of query"));
  }
  return CheckAlias(request.dquery, request.dquery_zeros);
}

// A counter for each tile of query rows, or none.
Status CheckCounters(const BackwardRequest& request, const Problem& p) {
  const int64_t tiles = p.batch * p.heads * p.head_tiles;
  for (const Tensor* tensor : {&request.counters_zeros, &request.counters}) {
    R2P_RETURN_IF_ERROR(CheckOptional(*tensor, R2P_S32, tiles, "the tiles of query"));
  }
  R2P_RETURN_IF_ERROR(
      CheckShape(request.counters, request.counters_zeros.dims, "the shape of counters_zeros"));
  return IsEmpty(request.counters) ? Status() : CheckAlias(request.counters, request.counters_zeros);
}

Status CheckRequest(const BackwardRequest& request, const Variant& variant, Problem* problem) {
  const AttentionCall& call = request.call;
  R2P_RETURN_IF_ERROR(CheckCall(call, R2P_BACKWARD, variant, problem));
  const Problem& p = *problem;
  const int64_t dout_shape[] = {p.batch, p.queries, p.heads, p.value_head_dim};
  const int64_t row_shape[] = {p.batch, p.heads, p.head_tiles * variant.tile_m};
  for (const Tensor* tensor : {&request.dout, &request.dkey, &request.dvalue}) {
    R2P_RETURN_IF_ERROR(CheckTensor(*tensor, variant.dtype, 4, kVectorAlignment));
  }
  R2P_RETURN_IF_ERROR(CheckShape(request.dout, dout_shape, "as query with the head dim of value"));
  R2P_RETURN_IF_ERROR(CheckShape(request.dkey, call.key.dims, "that of key"));
  R2P_RETURN_IF_ERROR(CheckShape(request.dvalue, call.value.dims, "that of value"));
  for (const Tensor* tensor : {&request.lse, &request.delta}) {
    R2P_RETURN_IF_ERROR(CheckTensor(*tensor, R2P_F32, 3, kVectorAlignment));
    R2P_RETURN_IF_ERROR(CheckShape(*tensor, row_shape, "(batch, heads, rows of whole tiles) of query"));
  }
  R2P_RETURN_IF_ERROR(CheckSums(request, variant, p));
  return CheckCounters(request, p);
}

// A thread block has tile_n keys of one head, and goes through the query rows that see them.
Status CountThreadBlocks(const Problem& problem, const Variant& variant, int64_t* blocks) {
  int64_t head_blocks = 0;
  R2P_RETURN_IF_ERROR(CountBlocks("key", problem.kv_batch, problem.kv_heads, problem.keys, variant.tile_n,
                                  kMaxInt32, &head_blocks));
  *blocks = head_blocks * problem.kv_batch * problem.kv_heads;
  return Status();
}

Status Pack(const Driver& driver, const BackwardRequest& request, const Variant& variant,
            const Problem& problem, Parameters* parameters) {
  const AttentionCall& call = request.call;
  const int32_t width = variant.head_dim, value_width = variant.value_head_dim;
  const int32_t queries = variant.tile_m, keys = variant.tile_n;
  R2P_RETURN_IF_ERROR(EncodeTensorMap(driver, call.query, queries, width, &parameters->query_map));
  R2P_RETURN_IF_ERROR(EncodeTensorMap(driver, call.key, keys, width, &parameters->key_map));
  R2P_RETURN_IF_ERROR(EncodeTensorMap(driver, call.value, keys, value_width, &parameters->value_map));
  R2P_RETURN_IF_ERROR(EncodeTensorMap(driver, request.dout, queries, value_width, &parameters->dout_map));
  R2P_RETURN_IF_ERROR(EncodeTensorMap(driver, request.dkey, kWarpgroupRows, width, &parameters->dkey_map));
  R2P_RETURN_IF_ERROR(
      EncodeTensorMap(driver, request.dvalue, kWarpgroupRows, value_width, &parameters->dvalue_map));
  parameters->query_dims = MakeDims(call.query);
  parameters->key_dims = MakeDims(call.key);
  parameters->value_dims = MakeDims(call.value);
  parameters->dout_dims = MakeDims(request.dout);
  parameters->dkey_dims = MakeDims(request.dkey);
  parameters->dvalue_dims = MakeDims(request.dvalue);
  parameters->dquery = request.dquery.data;
  parameters->lse = request.lse.data;
  parameters->delta = request.delta.data;
  parameters->counters = DataOrNull(request.counters);
  parameters->scale = call.scale.data;
  parameters->query_lengths = DataOrNull(call.query_lengths);
  parameters->key_lengths = DataOrNull(call.key_lengths);
  parameters->window_left = WindowLeft(call, problem);
  parameters->window_right = WindowRight(call, problem);
  parameters->group = Narrow(problem.heads / problem.kv_heads);
  parameters->kv_repeat = Narrow(call.kv_repeat);
  parameters->kv_inner = Narrow(call.kv_inner);
  return Status();
}

}  // namespace

Status LaunchBackward(const BackwardRequest& request) {
  VariantSlot* slot = nullptr;
  R2P_RETURN_IF_ERROR(FindVariant(request.call.variant, &slot));
  const Variant& variant = GetVariant(*slot);
  Problem problem;
  int64_t blocks = 0;
  R2P_RETURN_IF_ERROR(CheckRequest(request, variant, &problem));
  R2P_RETURN_IF_ERROR(CountThreadBlocks(problem, variant, &blocks));
  const auto launch = [&](const Driver& driver, const LoadedKernel& kernel) -> Status {
    Parameters parameters;
    R2P_RETURN_IF_ERROR(Pack(driver, request, variant, problem, &parameters));
    void* pointers[] = {
#define R2P_PARAMETER(name, size) &parameters.name,
#include "parameters_backward.def"
#undef R2P_PARAMETER
    };
    return Enqueue(driver, kernel, variant, blocks, request.call.stream, pointers);
  };
  return WithKernel(slot, request.call.stream, launch);
}

}  // namespace jax_r2p

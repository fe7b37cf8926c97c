#include "backward.h"

#include <algorithm>

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
  void* sums;
  void* marks;
  void* lse;
  void* delta;
  void* scale;
  void* dquery_factor;
  void* query_lengths;
  void* key_lengths;
  int32_t window_left;
  int32_t window_right;
  int32_t group;
  int32_t kv_repeat;
  int32_t kv_inner;
  int32_t slots;
  int32_t together;
  int32_t lag;
  int32_t deterministic;
};

#define R2P_PARAMETER(name, size) \
  static_assert(sizeof(Parameters::name) == (size), "parameters_backward.def: wrong size of " #name);
#include "parameters_backward.def"
#undef R2P_PARAMETER

// The (batch, head) pairs of key. Thread blocks are numbered by place, and then by block of keys; those of a
// place add to the sums of the `sharers` heads of query that share its keys.
int64_t Places(const Problem& p) { return p.kv_batch * p.kv_heads; }

// What the kernel works in: an operand of zeros, whose memory the result has.
template <size_t kRank>
Status CheckWorkspace(const Tensor& result, const Tensor& zeros, int32_t dtype, int64_t alignment,
                      const int64_t (&shape)[kRank], const char* rule) {
  for (const Tensor* tensor : {&zeros, &result}) {
    R2P_RETURN_IF_ERROR(CheckTensor(*tensor, dtype, kRank, alignment));
    R2P_RETURN_IF_ERROR(CheckShape(*tensor, shape, rule));
  }
  if (result.data != zeros.data) {
    return InvalidArgument(result.name, ": expected the address of ", zeros.name, ", ", zeros.data, "; got ",
                           result.data);
  }
  return Status();
}

// A slot has the sums of one head of query at a time, for tiles of its rows, in the order of the kernel's
// registers. How many slots there are only CheckRing limits.
Status CheckSlots(const BackwardRequest& request, const Variant& variant, const Problem& p) {
  const Tensor& zeros = request.sums_zeros;
  R2P_RETURN_IF_ERROR(CheckTensor(zeros, R2P_F32, 3, kVectorAlignment));
  const int64_t slots = zeros.dims[0];
  const int64_t sums_shape[] = {slots, p.head_tiles, int64_t{variant.tile_m} * variant.head_dim};
  const int64_t marks_shape[] = {slots, p.head_tiles + 2};
  R2P_RETURN_IF_ERROR(CheckWorkspace(request.sums, zeros, R2P_F32, kVectorAlignment, sums_shape,
                                     "(slots of sums_zeros, tiles of query, elements of a tile)"));
  return CheckWorkspace(request.marks, request.marks_zeros, R2P_S32, kScalarAlignment, marks_shape,
                        "(slots of sums_zeros, tiles of query and 2)");
}

// Thread blocks start in the order of their numbers, as far as there is room, so that one may wait only for
// those of lower numbers: else all that run may wait for one that has no room. Those of a group of `together`
// places are numbered together. They wait for all additions of the group `lag` before theirs, whose sums they
// finish. And before they add to a slot that has been used they wait for it to be finished, by the thread
// blocks `lag` groups after that use: these come first if the use was more than `lag` groups ago.
Status CheckRing(const BackwardRequest& request, const Problem& p) {
  const int64_t heads = p.batch * p.heads, slots = request.sums.dims[0];
  R2P_RETURN_IF_ERROR(CheckRange("together", request.together, 1, Places(p)));
  R2P_RETURN_IF_ERROR(CheckRange("lag", request.lag, 1, (Places(p) - 1) / request.together + 1));
  const int64_t sharers = request.together * (heads / Places(p));
  const int64_t least = std::min((request.lag + 1) * sharers, heads);
  if (slots < least || slots > heads) {
    return InvalidArgument("sums: expected ", least, "..", heads, " slots: at least ", sharers,
                           " for each of lag + 1 = ", request.lag + 1,
                           " groups of heads of key, or one for each head of query, and no more; got ",
                           slots);
  }
  return Status();
}

Status CheckRequest(const BackwardRequest& request, const Variant& variant, Problem* problem) {
  const AttentionCall& call = request.call;
  R2P_RETURN_IF_ERROR(CheckCall(call, R2P_BACKWARD, variant, problem));
  const Problem& p = *problem;
  const int64_t dout_shape[] = {p.batch, p.queries, p.heads, p.value_head_dim};
  const int64_t row_shape[] = {p.batch, p.heads, p.head_tiles * variant.tile_m};
  R2P_RETURN_IF_ERROR(CheckTensor(request.dquery_factor, R2P_F32, 0, kScalarAlignment));
  for (const Tensor* tensor : {&request.dout, &request.dquery, &request.dkey, &request.dvalue}) {
    R2P_RETURN_IF_ERROR(CheckTensor(*tensor, variant.dtype, 4, kVectorAlignment));
  }
  R2P_RETURN_IF_ERROR(CheckShape(request.dout, dout_shape, "as query with the head dim of value"));
  R2P_RETURN_IF_ERROR(CheckShape(request.dquery, call.query.dims, "that of query"));
  R2P_RETURN_IF_ERROR(CheckShape(request.dkey, call.key.dims, "that of key"));
  R2P_RETURN_IF_ERROR(CheckShape(request.dvalue, call.value.dims, "that of value"));
  for (const Tensor* tensor : {&request.lse, &request.delta}) {
    R2P_RETURN_IF_ERROR(CheckTensor(*tensor, R2P_F32, 3, kVectorAlignment));
    R2P_RETURN_IF_ERROR(CheckShape(*tensor, row_shape, "(batch, heads, rows of whole tiles) of query"));
  }
  R2P_RETURN_IF_ERROR(CheckSlots(request, variant, p));
  return CheckRing(request, p);
}

// A thread block has tile_n keys of one head, and goes through the query rows that see them. Those of `lag`
// more groups only finish sums.
Status CountThreadBlocks(const BackwardRequest& request, const Variant& variant, const Problem& problem,
                         int64_t* blocks) {
  int64_t head_blocks = 0;
  R2P_RETURN_IF_ERROR(CountBlocks("key", problem.kv_batch, problem.kv_heads, problem.keys, variant.tile_n,
                                  kMaxInt32, &head_blocks));
  const int64_t more = request.lag * request.together;
  *blocks = (Places(problem) + more) * head_blocks;
  if (*blocks > kMaxInt32) {
    return InvalidArgument("lag: expected key's batch times heads plus lag times together, times blocks of ",
                           variant.tile_n, " rows, to be at most ", kMaxInt32, "; got ", Places(problem),
                           " plus ", more, ", times ", head_blocks);
  }
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
  parameters->sums = request.sums.data;
  parameters->marks = request.marks.data;
  parameters->lse = request.lse.data;
  parameters->delta = request.delta.data;
  parameters->scale = call.scale.data;
  parameters->dquery_factor = request.dquery_factor.data;
  parameters->query_lengths = DataOrNull(call.query_lengths);
  parameters->key_lengths = DataOrNull(call.key_lengths);
  parameters->window_left = WindowLeft(call, problem);
  parameters->window_right = WindowRight(call, problem);
  parameters->group = Narrow(problem.heads / problem.kv_heads);
  parameters->kv_repeat = Narrow(call.kv_repeat);
  parameters->kv_inner = Narrow(call.kv_inner);
  parameters->slots = Narrow(request.sums.dims[0]);
  parameters->together = Narrow(request.together);
  parameters->lag = Narrow(request.lag);
  parameters->deterministic = request.deterministic ? 1 : 0;
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
  R2P_RETURN_IF_ERROR(CountThreadBlocks(request, variant, problem, &blocks));
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

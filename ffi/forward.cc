#include "forward.h"

#include <algorithm>

#include "cubin.h"
#include "driver.h"
#include "fast_divmod.h"
#include "launch.h"
#include "parameters.h"
#include "tensor_map.h"

namespace jax_r2p {
namespace {

constexpr int64_t kElementSize = 2;  // bytes of a bf16 or fp16 element

// How much of the keys and values the thread blocks that run together share. A Hopper GPU has 50 MB of L2,
// but with 32 MB a dense kernel read 3.4 times its inputs from device memory. With 8 MB dense calls take 1 to
// 3 % less time than with 16, long causal ones 1 to 2 % more; with 4 a window is 10 % slower.
constexpr int64_t kL2Budget = int64_t{8} << 20;         // bytes
constexpr int64_t kCausalL2Budget = int64_t{16} << 20;  // bytes
constexpr int64_t kMaxSectionKvHeads = 512;  // bounds the search for a divisor; L2 does not care beyond

// Key blocks that a thread block should come to: about a millisecond of work, beside which its start is
// short. Where there is more work for each than that, there are more thread blocks than fit at once: one that
// must wait for a multiprocessor, which another kernel holds, leaves the rest of its work to others.
constexpr int64_t kCtaKeyBlocks = 512;

// What the kernel receives; a field per entry of parameters_forward.def, which fixes the order.
struct Parameters {
  CUtensorMap query_map;
  CUtensorMap key_map;
  CUtensorMap value_map;
  CUtensorMap out_map;
  Dims query_dims;
  Dims key_dims;
  Dims value_dims;
  Dims out_dims;
  void* lse;
  void* query;
  void* key;
  void* value;
  void* scale;
  void* query_lengths;
  void* key_lengths;
  int32_t window_left;
  int32_t window_right;
  int32_t paired_tiles;
  FastDivmod section_tiles;
  int32_t section_tiles_size;
  FastDivmod section_heads;
  int32_t section_heads_size;
  FastDivmod heads;
  int32_t heads_size;
  FastDivmod group;
  int32_t group_size;
  FastDivmod kv_outer;
  int32_t kv_outer_size;
  FastDivmod kv_inner;
  int32_t kv_inner_size;
};

#define R2P_PARAMETER(name, size) \
  static_assert(sizeof(Parameters::name) == (size), "parameters_forward.def: wrong size of " #name);
#include "parameters_forward.def"
#undef R2P_PARAMETER

Status CheckRequest(const ForwardRequest& request, const Variant& variant, Problem* problem) {
  R2P_RETURN_IF_ERROR(CheckCall(request.call, R2P_FORWARD, variant, problem));
  const Problem& p = *problem;
  const int64_t out_shape[] = {p.batch, p.queries, p.heads, p.value_head_dim};
  const int64_t lse_shape[] = {p.batch, p.heads, p.queries};
  R2P_RETURN_IF_ERROR(CheckTensor(request.out, variant.dtype, 4, kVectorAlignment));
  R2P_RETURN_IF_ERROR(CheckShape(request.out, out_shape, "as query with the head dim of value"));
  R2P_RETURN_IF_ERROR(CheckTensor(request.lse, R2P_F32, 3, kScalarAlignment));
  return CheckShape(request.lse, lse_shape, "(batch, heads, rows) of query");
}

// How the tiles, of tile_m query rows each, are dealt out to thread blocks.
struct Schedule {
  int64_t section_heads;  // heads whose tiles are neighbours in the order of work
  int64_t section_tiles;  // tiles of a section
  int64_t paired_tiles;   // tiles of a causal kernel that are dealt out in pairs
  int64_t ctas;           // thread blocks
};

// The largest divisor of number that is a multiple of factor and at most `most`; 0 if there is none.
int64_t LargestDivisor(int64_t number, int64_t factor, int64_t most) {
  int64_t divisor = most / factor * factor;
  while (divisor > 0 && number % divisor != 0) {
    divisor -= factor;
  }
  return divisor;
}

// A section is a run of heads, whole groups and an equal number in each section, whose keys and values fit
// the L2 budget together: thread blocks that run at the same time find them there.
Schedule MakeSchedule(const AttentionCall& call, const Problem& problem, const Variant& variant,
                      int32_t multiprocessors) {
  const int64_t group = problem.heads / problem.kv_heads;
  const int64_t groups = problem.batch * problem.kv_heads;
  const int64_t bytes_per_kv_head = problem.keys * (variant.head_dim + variant.value_head_dim) * kElementSize;
  const int64_t budget = variant.is_causal ? kCausalL2Budget : kL2Budget;
  const int64_t most =
      std::min(std::clamp<int64_t>(budget / bytes_per_kv_head, 1, kMaxSectionKvHeads), groups);
  int64_t section_groups = 0;
  if (variant.is_causal && group * problem.head_tiles % 2 != 0) {
    section_groups = LargestDivisor(groups, 2, most);  // only an even number of tiles makes pairs
  }
  if (section_groups == 0) {
    section_groups = LargestDivisor(groups, 1, most);
  }
  const int64_t tiles = problem.head_tiles * problem.batch * problem.heads;
  const int64_t resident = int64_t{multiprocessors} * variant.min_blocks;

  Schedule schedule = {section_groups * group, section_groups * group * problem.head_tiles, 0, 0};
  // How many times over the resident thread blocks, for tiles of so many keys.
  const auto rounds = [&](int64_t count, int64_t keys) {
    return std::max<int64_t>(count / resident * ((keys - 1) / variant.tile_n + 1) / kCtaKeyBlocks, 1);
  };
  if (variant.is_causal) {
    // Tiles of whole sections are dealt out in pairs that are equally long. The last sections, with tiles
    // enough to keep every SM busy, have a thread block for each tile: they even out what the others left.
    // With twice as many of these, some calls took 1 % longer, and none less.
    const int64_t sections = std::max<int64_t>(tiles - resident, 0) / schedule.section_tiles;
    const int64_t pairs = sections * schedule.section_tiles / 2;
    schedule.ctas = tiles;
    if (schedule.section_tiles % 2 == 0 && pairs >= resident) {
      const int64_t keys = std::max<int64_t>(problem.keys - problem.queries / 2, 1);  // of a tile on average
      schedule.paired_tiles = 2 * pairs;
      schedule.ctas = std::min(pairs, rounds(2 * pairs, keys) * resident) + tiles - 2 * pairs;
    }
  } else {
    const int64_t visible = int64_t{WindowLeft(call, problem)} + WindowRight(call, problem) + variant.tile_m;
    schedule.ctas = std::min(tiles, rounds(tiles, std::min(visible, problem.keys)) * resident);
  }
  return schedule;
}

// Problem and Schedule hold numbers in 1..2^31-1, but paired_tiles may be 0.
Status Pack(const Driver& driver, const ForwardRequest& request, const Variant& variant,
            const Problem& problem, const Schedule& schedule, Parameters* parameters) {
  const AttentionCall& call = request.call;
  const int32_t width = variant.head_dim, value_width = variant.value_head_dim;
  R2P_RETURN_IF_ERROR(EncodeTensorMap(driver, call.query, kWarpgroupRows, width, &parameters->query_map));
  R2P_RETURN_IF_ERROR(EncodeTensorMap(driver, call.key, variant.tile_n, width, &parameters->key_map));
  R2P_RETURN_IF_ERROR(
      EncodeTensorMap(driver, call.value, variant.tile_n, value_width, &parameters->value_map));
  R2P_RETURN_IF_ERROR(
      EncodeTensorMap(driver, request.out, kWarpgroupRows, value_width, &parameters->out_map));
  parameters->query_dims = MakeDims(call.query);
  parameters->key_dims = MakeDims(call.key);
  parameters->value_dims = MakeDims(call.value);
  parameters->out_dims = MakeDims(request.out);
  parameters->lse = request.lse.data;
  parameters->query = call.query.data;
  parameters->key = call.key.data;
  parameters->value = call.value.data;
  parameters->scale = call.scale.data;
  parameters->query_lengths = DataOrNull(call.query_lengths);
  parameters->key_lengths = DataOrNull(call.key_lengths);
  parameters->window_left = WindowLeft(call, problem);
  parameters->window_right = WindowRight(call, problem);
  parameters->paired_tiles = Narrow(schedule.paired_tiles);
  parameters->section_tiles_size = Narrow(schedule.section_tiles);
  parameters->section_heads_size = Narrow(schedule.section_heads);
  parameters->heads_size = Narrow(problem.heads);
  parameters->group_size = Narrow(problem.heads / problem.kv_heads);
  parameters->kv_outer_size = Narrow(call.kv_repeat * call.kv_inner);
  parameters->kv_inner_size = Narrow(call.kv_inner);
  parameters->section_tiles = MakeFastDivmod(parameters->section_tiles_size);
  parameters->section_heads = MakeFastDivmod(parameters->section_heads_size);
  parameters->heads = MakeFastDivmod(parameters->heads_size);
  parameters->group = MakeFastDivmod(parameters->group_size);
  parameters->kv_outer = MakeFastDivmod(parameters->kv_outer_size);
  parameters->kv_inner = MakeFastDivmod(parameters->kv_inner_size);
  return Status();
}

}  // namespace

Status LaunchForward(const ForwardRequest& request) {
  VariantSlot* slot = nullptr;
  R2P_RETURN_IF_ERROR(FindVariant(request.call.variant, &slot));
  const Variant& variant = GetVariant(*slot);
  Problem problem;
  R2P_RETURN_IF_ERROR(CheckRequest(request, variant, &problem));
  const auto launch = [&](const Driver& driver, const LoadedKernel& kernel) -> Status {
    const Schedule schedule = MakeSchedule(request.call, problem, variant, kernel.multiprocessors);
    Parameters parameters;
    R2P_RETURN_IF_ERROR(Pack(driver, request, variant, problem, schedule, &parameters));
    void* pointers[] = {
#define R2P_PARAMETER(name, size) &parameters.name,
#include "parameters_forward.def"
#undef R2P_PARAMETER
    };
    return Enqueue(driver, kernel, variant, schedule.ctas, request.call.stream, pointers);
  };
  return WithKernel(slot, request.call.stream, launch);
}

}  // namespace jax_r2p

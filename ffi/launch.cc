#include "launch.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <limits>
#include <string>

#include "cubin.h"
#include "driver.h"
#include "fast_divmod.h"
#include "tensor_map.h"

namespace jax_r2p {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMapAlignment = 16;    // bytes; TMA's, and that of the kernel's vector loads
constexpr int64_t kScalarAlignment = 4;  // bytes; of scale, lse and lengths
constexpr int64_t kHeadDimMultiple = 8;  // elements; 16 bytes, TMA's unit of a stride
constexpr int64_t kElementSize = 2;      // bytes of a bf16 or fp16 element
constexpr int32_t kWarpgroupRows = 64;   // each warpgroup loads and stores its own rows of query and out

// How much of the keys and values the thread blocks that run together share. A Hopper GPU has 50 MB of L2,
// but with 32 MB a dense kernel read 3.4 times its inputs from device memory. 8 and 16 MB were equally fast.
constexpr int64_t kL2Budget = int64_t{16} << 20;  // bytes
constexpr int64_t kMaxSectionKvHeads = 512;       // bounds the search for a divisor; L2 does not care beyond

// A causal thread block takes this many tiles, so that its start and end are hidden three times out of four.
// The last ones take a single tile each, as many as keep every SM busy this many times over: tiles differ in
// length, and these even out what the others left.
constexpr int64_t kCausalTiles = 4;
constexpr int64_t kSingleRounds = 4;

// (rows, head dim, heads, batch) of an array, as the kernels take them.
struct Dims {
  int32_t rows;
  int32_t head_dim;
  int32_t heads;
  int32_t batch;
};

// What the kernel receives; a field per entry of parameters.def, which fixes the order.
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
  int32_t cta_tiles;
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

struct ParameterInfo {
  const char* name;
  size_t size;
};

#define R2P_PARAMETER(name, size) ParameterInfo{#name, size},
constexpr ParameterInfo kParameters[] = {
#include "parameters.def"
};
#undef R2P_PARAMETER

#define R2P_PARAMETER(name, size) \
  static_assert(sizeof(Parameters::name) == (size), "parameters.def: wrong size of " #name);
#include "parameters.def"
#undef R2P_PARAMETER

std::atomic<uint64_t> launch_count{0};

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

// `expected` has as many entries as the tensor, whose rank has been checked; `rule` says why those.
Status CheckShape(const Tensor& tensor, const int64_t* expected, const char* rule) {
  if (!std::equal(tensor.dims, tensor.dims + tensor.rank, expected)) {
    return InvalidArgument(tensor.name, ": expected shape ", ShapeText(expected, tensor.rank), ", ", rule,
                           "; got shape ", ShapeText(tensor.dims, tensor.rank));
  }
  return Status();
}

bool IsEmpty(const Tensor& tensor) { return tensor.rank == 1 && tensor.dims[0] == 0; }

// An empty array stands for lengths that are not given.
Status CheckLengths(const Tensor& lengths, int64_t batch) {
  if (IsEmpty(lengths) && lengths.dtype == R2P_S32) {
    return Status();
  }
  R2P_RETURN_IF_ERROR(CheckTensor(lengths, R2P_S32, 1, kScalarAlignment));
  return CheckShape(lengths, &batch, "the batch of query");
}

Status CheckRange(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    return InvalidArgument(name, ": expected ", low, "..", high, "; got ", value);
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

// The sizes of a request whose tensors have been checked.
struct Problem {
  int64_t batch;
  int64_t queries;
  int64_t heads;
  int64_t head_dim;
  int64_t value_head_dim;
  int64_t kv_batch;
  int64_t keys;
  int64_t kv_heads;
};

Status CheckRequest(const LaunchRequest& request, const Variant& variant, Problem* problem) {
  for (const Tensor* tensor : {&request.query, &request.key, &request.value, &request.out}) {
    R2P_RETURN_IF_ERROR(CheckTensor(*tensor, variant.dtype, 4, kMapAlignment));
  }
  R2P_RETURN_IF_ERROR(CheckTensor(request.scale, R2P_F32, 0, kScalarAlignment));
  R2P_RETURN_IF_ERROR(CheckTensor(request.lse, R2P_F32, 3, kScalarAlignment));

  const int64_t* query = request.query.dims;
  const int64_t* key = request.key.dims;
  const int64_t value_head_dim = request.value.dims[3];
  *problem = Problem{query[0], query[1], query[2], query[3], value_head_dim, key[0], key[1], key[2]};
  const Problem& p = *problem;
  const int64_t lse_shape[] = {p.batch, p.heads, p.queries};
  const int64_t key_shape[] = {p.kv_batch, p.keys, p.kv_heads, p.head_dim};
  const int64_t value_shape[] = {p.kv_batch, p.keys, p.kv_heads, p.value_head_dim};
  const int64_t out_shape[] = {p.batch, p.queries, p.heads, p.value_head_dim};
  R2P_RETURN_IF_ERROR(CheckShape(request.key, key_shape, "with the head dim of query"));
  R2P_RETURN_IF_ERROR(CheckShape(request.value, value_shape, "as key but for the head dim"));
  R2P_RETURN_IF_ERROR(CheckShape(request.out, out_shape, "as query with the head dim of value"));
  R2P_RETURN_IF_ERROR(CheckShape(request.lse, lse_shape, "(batch, heads, rows) of query"));
  R2P_RETURN_IF_ERROR(CheckLengths(request.query_lengths, p.batch));
  R2P_RETURN_IF_ERROR(CheckLengths(request.key_lengths, p.batch));

  R2P_RETURN_IF_ERROR(CheckHeadDim(request.query, variant.head_dim, variant));
  R2P_RETURN_IF_ERROR(CheckHeadDim(request.value, variant.value_head_dim, variant));
  if (p.heads % p.kv_heads != 0) {
    return InvalidArgument("key: expected a number of heads that divides the ", p.heads,
                           " heads of query; got ", p.kv_heads);
  }
  R2P_RETURN_IF_ERROR(CheckRange("query rows", p.queries, 1, kUnbounded));
  R2P_RETURN_IF_ERROR(CheckRange("key rows", p.keys, 1, kUnbounded));
  R2P_RETURN_IF_ERROR(CheckRange("query heads", p.heads, 1, kMaxInt32));
  R2P_RETURN_IF_ERROR(CheckRange("query batch", p.batch, 1, kMaxInt32));
  // The kernel numbers the (batch, head) pairs in 32 bits.
  if (p.batch > kUnbounded / p.heads) {
    return InvalidArgument("query: expected batch times heads to be at most ", kUnbounded, "; got ", p.batch,
                           " times ", p.heads);
  }
  R2P_RETURN_IF_ERROR(CheckRange("window_left", request.window_left, 0, kUnbounded));
  R2P_RETURN_IF_ERROR(CheckRange("window_right", request.window_right, 0, kUnbounded));
  // Together these give kv_repeat * kv_inner <= kv_repeat * key's batch == query's batch.
  R2P_RETURN_IF_ERROR(CheckRange("kv_repeat", request.kv_repeat, 1, p.batch));
  R2P_RETURN_IF_ERROR(CheckRange("kv_inner", request.kv_inner, 1, p.batch));
  if (p.kv_batch % request.kv_inner != 0) {
    return InvalidArgument("kv_inner: expected a divisor of key's batch ", p.kv_batch, "; got ",
                           request.kv_inner);
  }
  if (p.batch % request.kv_repeat != 0 || p.batch / request.kv_repeat != p.kv_batch) {
    return InvalidArgument("kv_repeat: expected query's batch ", p.batch, " to be key's batch ", p.kv_batch,
                           " times kv_repeat; got ", request.kv_repeat);
  }
  return Status();
}

int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// How the tiles, of tile_m query rows each, are dealt out to thread blocks.
struct Schedule {
  int64_t section_heads;  // heads whose tiles are neighbours in the order of work
  int64_t section_tiles;  // tiles of a section
  int64_t cta_tiles;      // tiles of a causal thread block, except the last ones
  int64_t ctas;           // thread blocks
};

// A section is a run of heads, whole groups and an equal number in each section, whose keys and values fit
// the L2 budget together: thread blocks that run at the same time find them there.
Status MakeSchedule(const Problem& problem, const Variant& variant, int32_t multiprocessors,
                    Schedule* schedule) {
  const int64_t group = problem.heads / problem.kv_heads;
  const int64_t groups = problem.batch * problem.kv_heads;
  const int64_t bytes_per_kv_head = problem.keys * (variant.head_dim + variant.value_head_dim) * kElementSize;
  int64_t section_groups = std::clamp<int64_t>(kL2Budget / bytes_per_kv_head, 1, kMaxSectionKvHeads);
  section_groups = std::min(section_groups, groups);
  while (groups % section_groups != 0) {
    --section_groups;
  }
  const int64_t head_tiles = CeilDivide(problem.queries, variant.tile_m);
  if (head_tiles > kUnbounded / (problem.batch * problem.heads)) {
    return InvalidArgument("query: expected batch times heads times blocks of ", variant.tile_m,
                           " rows to be at most ", kUnbounded, "; got ", problem.batch, " times ",
                           problem.heads, " times ", head_tiles);
  }
  const int64_t tiles = head_tiles * problem.batch * problem.heads;
  const int64_t resident = int64_t{multiprocessors} * variant.min_blocks;

  *schedule = Schedule{section_groups * group, section_groups * group * head_tiles, kCausalTiles, 0};
  if (variant.is_causal) {
    const int64_t singles = std::max(schedule->section_tiles, kSingleRounds * resident);
    const int64_t several = std::max<int64_t>(tiles - singles, 0) / kCausalTiles;
    schedule->ctas = several + tiles - several * kCausalTiles;
  } else {
    schedule->ctas = std::min(tiles, resident);
  }
  return Status();
}

// The casts below are of numbers that CheckRequest and MakeSchedule have found to be in 1..2^31-1.
int32_t Narrow(int64_t checked) { return static_cast<int32_t>(checked); }

Dims MakeDims(const Tensor& tensor) {
  return Dims{Narrow(tensor.dims[1]), Narrow(tensor.dims[3]), Narrow(tensor.dims[2]), Narrow(tensor.dims[0])};
}

// `tile_columns`: the width of the kernel's tiles of this array.
Status EncodeMap(const Driver& driver, const Tensor& tensor, int32_t box_rows, int32_t tile_columns,
                 CUtensorMap* map) {
  const CUtensorMapDataType type =
      tensor.dtype == R2P_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const MapSource source{tensor.name,    tensor.data,    type,          tensor.dims[0],
                         tensor.dims[1], tensor.dims[2], tensor.dims[3]};
  return EncodeTensorMap(driver, source, box_rows, MapBoxColumns(tile_columns), map);
}

Status Pack(const Driver& driver, const LaunchRequest& request, const Variant& variant,
            const Problem& problem, const Schedule& schedule, Parameters* parameters) {
  const int32_t width = variant.head_dim, value_width = variant.value_head_dim;
  R2P_RETURN_IF_ERROR(EncodeMap(driver, request.query, kWarpgroupRows, width, &parameters->query_map));
  R2P_RETURN_IF_ERROR(EncodeMap(driver, request.key, variant.tile_n, width, &parameters->key_map));
  R2P_RETURN_IF_ERROR(EncodeMap(driver, request.value, variant.tile_n, value_width, &parameters->value_map));
  R2P_RETURN_IF_ERROR(EncodeMap(driver, request.out, kWarpgroupRows, value_width, &parameters->out_map));
  parameters->query_dims = MakeDims(request.query);
  parameters->key_dims = MakeDims(request.key);
  parameters->value_dims = MakeDims(request.value);
  parameters->out_dims = MakeDims(request.out);
  parameters->lse = request.lse.data;
  parameters->query = request.query.data;
  parameters->key = request.key.data;
  parameters->value = request.value.data;
  parameters->scale = request.scale.data;
  // Of an empty buffer XLA may pass any address.
  parameters->query_lengths = IsEmpty(request.query_lengths) ? nullptr : request.query_lengths.data;
  parameters->key_lengths = IsEmpty(request.key_lengths) ? nullptr : request.key_lengths.data;
  // Ends that far off hide no key, and the kernel's sums with smaller ones stay far from overflow.
  parameters->window_left = Narrow(std::min<int64_t>(request.window_left, problem.keys));
  parameters->window_right = Narrow(std::min<int64_t>(request.window_right, problem.queries));
  parameters->cta_tiles = Narrow(schedule.cta_tiles);
  parameters->section_tiles_size = Narrow(schedule.section_tiles);
  parameters->section_heads_size = Narrow(schedule.section_heads);
  parameters->heads_size = Narrow(problem.heads);
  parameters->group_size = Narrow(problem.heads / problem.kv_heads);
  parameters->kv_outer_size = Narrow(request.kv_repeat * request.kv_inner);
  parameters->kv_inner_size = Narrow(request.kv_inner);
  parameters->section_tiles = MakeFastDivmod(parameters->section_tiles_size);
  parameters->section_heads = MakeFastDivmod(parameters->section_heads_size);
  parameters->heads = MakeFastDivmod(parameters->heads_size);
  parameters->group = MakeFastDivmod(parameters->group_size);
  parameters->kv_outer = MakeFastDivmod(parameters->kv_outer_size);
  parameters->kv_inner = MakeFastDivmod(parameters->kv_inner_size);
  return Status();
}

Status Enqueue(const Driver& driver, CUfunction function, const Variant& variant, int64_t ctas,
               CUstream stream, Parameters* parameters) {
  void* pointers[] = {
#define R2P_PARAMETER(name, size) &parameters->name,
#include "parameters.def"
#undef R2P_PARAMETER
  };
  CUlaunchConfig config = {};
  config.gridDimX = static_cast<unsigned int>(ctas);
  config.gridDimY = 1;
  config.gridDimZ = 1;
  config.blockDimX = static_cast<unsigned int>(variant.threads);
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned int>(variant.shared_memory);
  config.hStream = stream;
  // The driver copies the parameters before it returns.
  R2P_DRIVER_CALL(
      driver, cuLaunchKernelEx,
      Text("variant '", variant.name, "' with ", ctas, " blocks of ", variant.threads, " threads"), &config,
      function, pointers, nullptr);
  launch_count.fetch_add(1, std::memory_order_relaxed);
  return Status();
}

}  // namespace

Status Load(std::string_view variant, CUstream stream) {
  VariantSlot* slot = nullptr;
  const Driver* driver = nullptr;
  CUcontext context = nullptr;
  R2P_RETURN_IF_ERROR(FindVariant(variant, &slot));
  R2P_RETURN_IF_ERROR(GetDriver(&driver));
  R2P_RETURN_IF_ERROR(ContextOf(*driver, stream, &context));
  return InContext(*driver, context, [&] {
    LoadedKernel kernel;
    return GetKernel(*driver, context, slot, &kernel);
  });
}

Status Launch(const LaunchRequest& request) {
  VariantSlot* slot = nullptr;
  R2P_RETURN_IF_ERROR(FindVariant(request.variant, &slot));
  const Variant& variant = GetVariant(*slot);
  Problem problem;
  R2P_RETURN_IF_ERROR(CheckRequest(request, variant, &problem));
  const Driver* driver = nullptr;
  CUcontext context = nullptr;
  R2P_RETURN_IF_ERROR(GetDriver(&driver));
  R2P_RETURN_IF_ERROR(ContextOf(*driver, request.stream, &context));
  return InContext(*driver, context, [&]() -> Status {
    LoadedKernel kernel;
    R2P_RETURN_IF_ERROR(GetKernel(*driver, context, slot, &kernel));
    Schedule schedule;
    R2P_RETURN_IF_ERROR(MakeSchedule(problem, variant, kernel.multiprocessors, &schedule));
    Parameters parameters;
    R2P_RETURN_IF_ERROR(Pack(*driver, request, variant, problem, schedule, &parameters));
    return Enqueue(*driver, kernel.function, variant, schedule.ctas, request.stream, &parameters);
  });
}

uint64_t LaunchCount() { return launch_count.load(std::memory_order_relaxed); }

size_t ParameterCount() { return std::size(kParameters); }
const char* ParameterName(size_t index) { return kParameters[index].name; }
size_t ParameterSize(size_t index) { return kParameters[index].size; }

}  // namespace jax_r2p

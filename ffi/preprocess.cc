#include "preprocess.h"

#include "attention.h"
#include "cubin.h"
#include "driver.h"
#include "launch.h"
#include "parameters.h"

namespace jax_r2p {
namespace {

constexpr int64_t kZerosMultiple = 4;  // elements of sums; 16 bytes, what a thread stores at a time

// The most elements of sums: more than a device has memory for, and far from where 64-bit sizes in bytes
// would overflow.
constexpr int64_t kMaxElements = int64_t{1} << 48;

// What the kernel receives; a field per entry of parameters_preprocess.def, which fixes the order.
struct Parameters {
  void* out;
  void* dout;
  void* lse;
  void* dlse;
  void* query_lengths;
  void* lse_base2;
  void* delta;
  void* sums;
  void* marks;
  int64_t sums_size;
  int64_t marks_size;
  int32_t queries;
  int32_t rows;
  int32_t heads;
  int32_t value_head_dim;
};

#define R2P_PARAMETER(name, size) \
  static_assert(sizeof(Parameters::name) == (size), "parameters_preprocess.def: wrong size of " #name);
#include "parameters_preprocess.def"
#undef R2P_PARAMETER

// The sizes of a call that CheckRequest has accepted.
struct Sizes {
  int64_t batch;
  int64_t queries;
  int64_t heads;
  int64_t value_head_dim;
  int64_t rows;        // of lse_base2 and delta in a head
  int64_t head_tiles;  // tiles of the variant's tile_m rows in a head; in all heads at most kUnbounded
  int64_t sums;        // elements
  int64_t marks;       // likewise
};

// What is filled with zeros. How many slots and tiles there are only the backward kernel limits.
Status CheckZeros(const PreprocessRequest& request, Sizes* sizes) {
  R2P_RETURN_IF_ERROR(CheckTensor(request.sums, R2P_F32, 3, kVectorAlignment));
  R2P_RETURN_IF_ERROR(CheckTensor(request.marks, R2P_S32, 2, kScalarAlignment));
  const int64_t slots = request.sums.dims[0], tiles = request.sums.dims[1], elements = request.sums.dims[2];
  if (elements % kZerosMultiple != 0) {
    return InvalidArgument("sums: expected tiles of a multiple of ", kZerosMultiple, " elements; got ",
                           elements);
  }
  if (slots > kMaxElements / tiles / elements) {
    return InvalidArgument("sums: expected slots times tiles times elements of a tile to be at most ",
                           kMaxElements, "; got ", slots, " times ", tiles, " times ", elements);
  }
  const int64_t marks_shape[] = {slots, tiles + 2};
  R2P_RETURN_IF_ERROR(CheckShape(request.marks, marks_shape, "(slots of sums, tiles of sums and 2)"));
  sizes->sums = slots * tiles * elements;
  sizes->marks = slots * (tiles + 2);
  return Status();
}

Status CheckRequest(const PreprocessRequest& request, const Variant& variant, Sizes* sizes) {
  R2P_RETURN_IF_ERROR(CheckRole(variant, R2P_PREPROCESS));
  for (const Tensor* tensor : {&request.out, &request.dout}) {
    R2P_RETURN_IF_ERROR(CheckTensor(*tensor, variant.dtype, 4, kVectorAlignment));
  }
  for (const Tensor* tensor : {&request.lse, &request.dlse, &request.lse_base2, &request.delta}) {
    R2P_RETURN_IF_ERROR(CheckTensor(*tensor, R2P_F32, 3, kScalarAlignment));
  }
  const int64_t* out = request.out.dims;
  *sizes = Sizes{out[0], out[1], out[2], out[3], request.lse_base2.dims[2], 0, 0, 0};
  const Sizes& s = *sizes;
  const int64_t lse_shape[] = {s.batch, s.heads, s.queries};
  const int64_t row_shape[] = {s.batch, s.heads, s.rows};
  R2P_RETURN_IF_ERROR(CheckShape(request.dout, out, "that of out"));
  R2P_RETURN_IF_ERROR(CheckShape(request.lse, lse_shape, "(batch, heads, rows) of out"));
  R2P_RETURN_IF_ERROR(CheckShape(request.dlse, lse_shape, "(batch, heads, rows) of out"));
  R2P_RETURN_IF_ERROR(CheckOptional(request.query_lengths, R2P_S32, s.batch, "the batch of out"));
  R2P_RETURN_IF_ERROR(CheckHeadDim(request.out, variant.value_head_dim, variant));
  R2P_RETURN_IF_ERROR(CheckSizes(request.out));
  R2P_RETURN_IF_ERROR(CheckShape(request.lse_base2, row_shape, "as lse but for the rows"));
  R2P_RETURN_IF_ERROR(CheckRange("lse_base2 rows", s.rows, s.queries, s.queries + variant.tile_m - 1));
  R2P_RETURN_IF_ERROR(CheckShape(request.delta, row_shape, "that of lse_base2"));
  R2P_RETURN_IF_ERROR(CheckZeros(request, sizes));
  return CountBlocks("lse_base2", s.batch, s.heads, s.rows, variant.tile_m, kUnbounded, &sizes->head_tiles);
}

Parameters Pack(const PreprocessRequest& request, const Sizes& sizes) {
  Parameters parameters;
  parameters.out = request.out.data;
  parameters.dout = request.dout.data;
  parameters.lse = request.lse.data;
  parameters.dlse = request.dlse.data;
  parameters.query_lengths = DataOrNull(request.query_lengths);
  parameters.lse_base2 = request.lse_base2.data;
  parameters.delta = request.delta.data;
  parameters.sums = request.sums.data;
  parameters.marks = request.marks.data;
  parameters.sums_size = sizes.sums;
  parameters.marks_size = sizes.marks;
  parameters.queries = Narrow(sizes.queries);
  parameters.rows = Narrow(sizes.rows);
  parameters.heads = Narrow(sizes.heads);
  parameters.value_head_dim = Narrow(sizes.value_head_dim);
  return parameters;
}

}  // namespace

Status LaunchPreprocess(const PreprocessRequest& request) {
  VariantSlot* slot = nullptr;
  R2P_RETURN_IF_ERROR(FindVariant(request.variant, &slot));
  const Variant& variant = GetVariant(*slot);
  Sizes sizes;
  R2P_RETURN_IF_ERROR(CheckRequest(request, variant, &sizes));
  // A thread block has tile_m rows of one head.
  const int64_t blocks = sizes.batch * sizes.heads * sizes.head_tiles;
  const auto launch = [&](const Driver& driver, const LoadedKernel& kernel) -> Status {
    Parameters parameters = Pack(request, sizes);
    void* pointers[] = {
#define R2P_PARAMETER(name, size) &parameters.name,
#include "parameters_preprocess.def"
#undef R2P_PARAMETER
    };
    return Enqueue(driver, kernel, variant, blocks, request.stream, pointers);
  };
  return WithKernel(slot, request.stream, launch);
}

}  // namespace jax_r2p

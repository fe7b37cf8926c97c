#include "c_api.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "attention.h"
#include "backward.h"
#include "cubin.h"
#include "forward.h"
#include "launch.h"
#include "parameters.h"
#include "preprocess.h"
#include "status.h"
#include "tensor.h"
#include "tensor_map.h"

namespace jax_r2p {
namespace {

constexpr int32_t kWarp = 32;
constexpr int32_t kMaxThreads = 1024;
constexpr int32_t kMaxSharedMemory = 227 * 1024;  // bytes a Hopper thread block may have
constexpr int32_t kMaxHeadDim = 256;

int Report(const Status& status, char* error, size_t error_size) {
  if (!status.ok() && error != nullptr && error_size > 0) {
    const size_t length = std::min(status.message().size(), error_size - 1);
    std::memcpy(error, status.message().data(), length);
    error[length] = '\0';
  }
  return status.code();
}

template <typename Body>
int Run(char* error, size_t error_size, Body&& body) {
  return Report(WithoutExceptions(std::forward<Body>(body)), error, error_size);
}

Status CheckNotNull(const char* name, const void* pointer) {
  return pointer != nullptr ? Status() : InvalidArgument(name, ": expected a value; got a null pointer");
}

// A caller built against another version of the header would have its fields read at the wrong offsets.
Status CheckStructSize(const char* name, size_t expected, size_t got) {
  if (got == expected) {
    return Status();
  }
  return InvalidArgument(name, ".struct_size: expected ", expected, "; got ", got,
                         ": the Python files and libjax_r2p.so are of different versions, reinstall jax_r2p");
}

Status CheckField(const R2pVariant& variant, const char* field, int64_t value, int64_t low, int64_t high,
                  int64_t multiple) {
  if (value >= low && value <= high && value % multiple == 0) {
    return Status();
  }
  return InvalidArgument("variant '", variant.name, "', ", field, ": expected a multiple of ", multiple,
                         " in ", low, "..", high, "; got ", value);
}

Status CheckParameters(const R2pVariant& variant) {
  const auto describe = [](const char* name, size_t size) { return Text(name, " of ", size, " bytes"); };
  const ParameterList expected = ParametersOf(static_cast<R2pRole>(variant.role));
  if (variant.parameter_count != expected.count) {
    return InvalidArgument("variant '", variant.name, "', parameters: expected ", expected.count, "; got ",
                           variant.parameter_count);
  }
  R2P_RETURN_IF_ERROR(CheckNotNull("variant.parameters", variant.parameters));
  for (size_t i = 0; i < variant.parameter_count; ++i) {
    const R2pParameter& parameter = variant.parameters[i];
    R2P_RETURN_IF_ERROR(CheckNotNull("variant.parameters.name", parameter.name));
    const auto& [name, size] = expected.entries[i];
    if (std::strcmp(parameter.name, name) != 0 || parameter.size != size) {
      return InvalidArgument("variant '", variant.name, "', parameter ", i, ": expected ",
                             describe(name, size), "; got ", describe(parameter.name, parameter.size));
    }
  }
  return Status();
}

Status AddVariantFromC(const R2pVariant* variant) {
  R2P_RETURN_IF_ERROR(CheckNotNull("variant", variant));
  R2P_RETURN_IF_ERROR(CheckStructSize("R2pVariant", sizeof(R2pVariant), variant->struct_size));
  R2P_RETURN_IF_ERROR(CheckNotNull("variant.name", variant->name));
  R2P_RETURN_IF_ERROR(CheckNotNull("variant.entry", variant->entry));
  R2P_RETURN_IF_ERROR(CheckNotNull("variant.cubin", variant->cubin));
  if (variant->role < R2P_FORWARD || variant->role > R2P_PREPROCESS) {
    return InvalidArgument("variant '", variant->name, "', role: expected ", R2P_FORWARD, " (forward), ",
                           R2P_BACKWARD, " (backward) or ", R2P_PREPROCESS, " (preprocess); got ",
                           variant->role);
  }
  if (variant->dtype != R2P_BF16 && variant->dtype != R2P_F16) {
    return InvalidArgument("variant '", variant->name, "', dtype: expected ", R2P_BF16, " (bfloat16) or ",
                           R2P_F16, " (float16); got ", variant->dtype);
  }
  R2P_RETURN_IF_ERROR(
      CheckField(*variant, "cubin_size", static_cast<int64_t>(variant->cubin_size), 1, INT32_MAX, 1));
  R2P_RETURN_IF_ERROR(
      CheckField(*variant, "head_dim", variant->head_dim, kMapNarrowBox, kMaxHeadDim, kMapNarrowBox));
  R2P_RETURN_IF_ERROR(CheckField(*variant, "value_head_dim", variant->value_head_dim, kMapNarrowBox,
                                 kMaxHeadDim, kMapNarrowBox));
  R2P_RETURN_IF_ERROR(CheckField(*variant, "tile_m", variant->tile_m, 8, kMapMaxBoxRows, 8));
  if (variant->role == R2P_PREPROCESS) {  // has no keys
    R2P_RETURN_IF_ERROR(CheckField(*variant, "tile_n", variant->tile_n, 0, 0, 1));
  } else {
    R2P_RETURN_IF_ERROR(CheckField(*variant, "tile_n", variant->tile_n, 8, kMapMaxBoxRows, 8));
  }
  R2P_RETURN_IF_ERROR(CheckField(*variant, "threads", variant->threads, kWarp, kMaxThreads, kWarp));
  R2P_RETURN_IF_ERROR(CheckField(*variant, "shared_memory", variant->shared_memory, 0, kMaxSharedMemory, 1));
  R2P_RETURN_IF_ERROR(CheckField(*variant, "min_blocks", variant->min_blocks, 1, kMaxThreads / kWarp, 1));
  R2P_RETURN_IF_ERROR(CheckField(*variant, "is_causal", variant->is_causal, 0, 1, 1));
  R2P_RETURN_IF_ERROR(CheckParameters(*variant));
  Variant copy;
  copy.name = variant->name;
  copy.entry = variant->entry;
  copy.cubin.assign(static_cast<const char*>(variant->cubin), variant->cubin_size);
  copy.role = static_cast<R2pRole>(variant->role);
  copy.dtype = variant->dtype;
  copy.head_dim = variant->head_dim;
  copy.value_head_dim = variant->value_head_dim;
  copy.tile_m = variant->tile_m;
  copy.tile_n = variant->tile_n;
  copy.threads = variant->threads;
  copy.shared_memory = variant->shared_memory;
  copy.min_blocks = variant->min_blocks;
  copy.is_causal = variant->is_causal != 0;
  return AddVariant(std::move(copy));
}

Status AddBrokenVariantFromC(const char* name, const char* message) {
  R2P_RETURN_IF_ERROR(CheckNotNull("name", name));
  R2P_RETURN_IF_ERROR(CheckNotNull("message", message));
  if (*message == '\0') {
    return InvalidArgument("message: expected a text that says what is wrong; got an empty one");
  }
  return AddBrokenVariant(name, message);
}

Status ToTensor(const char* name, const R2pTensor& from, Tensor* to) {
  constexpr int32_t kMaxRank = sizeof(from.dims) / sizeof(from.dims[0]);
  if (from.rank < 0 || from.rank > kMaxRank) {
    return InvalidArgument(name, ": expected a rank in 0..", kMaxRank, "; got ", from.rank);
  }
  *to = Tensor{name, from.data, from.dtype, from.dims, static_cast<size_t>(from.rank)};
  return Status();
}

// The fields that R2pLaunch and R2pBackward share.
template <typename FromC>
Status ToCall(const FromC& from, AttentionCall* call) {
  R2P_RETURN_IF_ERROR(CheckNotNull("launch.variant", from.variant));
  call->variant = from.variant;
  R2P_RETURN_IF_ERROR(ToTensor("query", from.query, &call->query));
  R2P_RETURN_IF_ERROR(ToTensor("key", from.key, &call->key));
  R2P_RETURN_IF_ERROR(ToTensor("value", from.value, &call->value));
  R2P_RETURN_IF_ERROR(ToTensor("scale", from.scale, &call->scale));
  R2P_RETURN_IF_ERROR(ToTensor("query_lengths", from.query_lengths, &call->query_lengths));
  R2P_RETURN_IF_ERROR(ToTensor("key_lengths", from.key_lengths, &call->key_lengths));
  call->window_left = from.window_left;
  call->window_right = from.window_right;
  call->kv_repeat = from.kv_repeat;
  call->kv_inner = from.kv_inner;
  call->stream = static_cast<CUstream>(from.stream);
  return Status();
}

Status LaunchFromC(const R2pLaunch* launch) {
  R2P_RETURN_IF_ERROR(CheckNotNull("launch", launch));
  R2P_RETURN_IF_ERROR(CheckStructSize("R2pLaunch", sizeof(R2pLaunch), launch->struct_size));
  ForwardRequest request = {};
  R2P_RETURN_IF_ERROR(ToCall(*launch, &request.call));
  R2P_RETURN_IF_ERROR(ToTensor("out", launch->out, &request.out));
  R2P_RETURN_IF_ERROR(ToTensor("lse", launch->lse, &request.lse));
  return LaunchForward(request);
}

Status LaunchBackwardFromC(const R2pBackward* launch) {
  R2P_RETURN_IF_ERROR(CheckNotNull("launch", launch));
  R2P_RETURN_IF_ERROR(CheckStructSize("R2pBackward", sizeof(R2pBackward), launch->struct_size));
  BackwardRequest request = {};
  R2P_RETURN_IF_ERROR(ToCall(*launch, &request.call));
  R2P_RETURN_IF_ERROR(ToTensor("dout", launch->dout, &request.dout));
  R2P_RETURN_IF_ERROR(ToTensor("lse", launch->lse, &request.lse));
  R2P_RETURN_IF_ERROR(ToTensor("delta", launch->delta, &request.delta));
  R2P_RETURN_IF_ERROR(ToTensor("dquery_factor", launch->dquery_factor, &request.dquery_factor));
  R2P_RETURN_IF_ERROR(ToTensor("sums_zeros", launch->sums_zeros, &request.sums_zeros));
  R2P_RETURN_IF_ERROR(ToTensor("marks_zeros", launch->marks_zeros, &request.marks_zeros));
  R2P_RETURN_IF_ERROR(ToTensor("dquery", launch->dquery, &request.dquery));
  R2P_RETURN_IF_ERROR(ToTensor("dkey", launch->dkey, &request.dkey));
  R2P_RETURN_IF_ERROR(ToTensor("dvalue", launch->dvalue, &request.dvalue));
  R2P_RETURN_IF_ERROR(ToTensor("sums", launch->sums, &request.sums));
  R2P_RETURN_IF_ERROR(ToTensor("marks", launch->marks, &request.marks));
  R2P_RETURN_IF_ERROR(CheckRange("deterministic", launch->deterministic, 0, 1));
  request.together = launch->together;
  request.lag = launch->lag;
  request.deterministic = launch->deterministic != 0;
  return LaunchBackward(request);
}

Status LaunchPreprocessFromC(const R2pPreprocess* launch) {
  R2P_RETURN_IF_ERROR(CheckNotNull("launch", launch));
  R2P_RETURN_IF_ERROR(CheckStructSize("R2pPreprocess", sizeof(R2pPreprocess), launch->struct_size));
  R2P_RETURN_IF_ERROR(CheckNotNull("launch.variant", launch->variant));
  PreprocessRequest request = {};
  request.variant = launch->variant;
  R2P_RETURN_IF_ERROR(ToTensor("out", launch->out, &request.out));
  R2P_RETURN_IF_ERROR(ToTensor("dout", launch->dout, &request.dout));
  R2P_RETURN_IF_ERROR(ToTensor("lse", launch->lse, &request.lse));
  R2P_RETURN_IF_ERROR(ToTensor("dlse", launch->dlse, &request.dlse));
  R2P_RETURN_IF_ERROR(ToTensor("query_lengths", launch->query_lengths, &request.query_lengths));
  R2P_RETURN_IF_ERROR(ToTensor("lse_base2", launch->lse_base2, &request.lse_base2));
  R2P_RETURN_IF_ERROR(ToTensor("delta", launch->delta, &request.delta));
  R2P_RETURN_IF_ERROR(ToTensor("sums", launch->sums, &request.sums));
  R2P_RETURN_IF_ERROR(ToTensor("marks", launch->marks, &request.marks));
  request.stream = static_cast<CUstream>(launch->stream);
  return LaunchPreprocess(request);
}

}  // namespace
}  // namespace jax_r2p

int r2p_add_variant(const R2pVariant* variant, char* error, size_t error_size) {
  return jax_r2p::Run(error, error_size, [&] { return jax_r2p::AddVariantFromC(variant); });
}

int r2p_add_broken_variant(const char* name, const char* message, char* error, size_t error_size) {
  return jax_r2p::Run(error, error_size, [&] { return jax_r2p::AddBrokenVariantFromC(name, message); });
}

int r2p_load(const char* variant, void* stream, char* error, size_t error_size) {
  return jax_r2p::Run(error, error_size, [&]() -> jax_r2p::Status {
    R2P_RETURN_IF_ERROR(jax_r2p::CheckNotNull("variant", variant));
    return jax_r2p::Load(variant, static_cast<CUstream>(stream));
  });
}

int r2p_launch(const R2pLaunch* launch, char* error, size_t error_size) {
  return jax_r2p::Run(error, error_size, [&] { return jax_r2p::LaunchFromC(launch); });
}

int r2p_launch_backward(const R2pBackward* launch, char* error, size_t error_size) {
  return jax_r2p::Run(error, error_size, [&] { return jax_r2p::LaunchBackwardFromC(launch); });
}

int r2p_launch_preprocess(const R2pPreprocess* launch, char* error, size_t error_size) {
  return jax_r2p::Run(error, error_size, [&] { return jax_r2p::LaunchPreprocessFromC(launch); });
}

void r2p_counters(R2pCounters* counters) {
  *counters = R2pCounters{jax_r2p::LoadCount(), jax_r2p::LaunchCount()};
}

// The XLA FFI handlers of the attention calls; jax_r2p/_ffi.py has their names, which change with their
// signatures. They only translate: buffers and attributes into a request, a Status into an ffi::Error.

#include <cstdint>
#include <string_view>

#include "attention.h"
#include "backward.h"
#include "c_api.h"
#include "forward.h"
#include "launch.h"
#include "preprocess.h"
#include "status.h"
#include "tensor.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// A handler of API 0.1 is taken by every jaxlib so far; one built with later headers is refused by earlier
// jaxlibs, and a refused handler keeps the whole backend from starting. So the build takes the headers of an
// old jaxlib, and this fails when it finds others.
static_assert(XLA_FFI_API_MAJOR == 0 && XLA_FFI_API_MINOR == 1,
              "build with the headers of jaxlib 0.7.2 (FFI API 0.1)");

// Buffers hand their element types over as numbers.
static_assert(static_cast<int>(R2P_S32) == static_cast<int>(XLA_FFI_DataType_S32));
static_assert(static_cast<int>(R2P_F16) == static_cast<int>(XLA_FFI_DataType_F16));
static_assert(static_cast<int>(R2P_F32) == static_cast<int>(XLA_FFI_DataType_F32));
static_assert(static_cast<int>(R2P_BF16) == static_cast<int>(XLA_FFI_DataType_BF16));

// The headers define the handlers without saying that they are exported.
extern "C" R2P_EXPORT XLA_FFI_Error* jax_r2p_attention_forward_initialize(XLA_FFI_CallFrame* call_frame);
extern "C" R2P_EXPORT XLA_FFI_Error* jax_r2p_attention_forward_execute(XLA_FFI_CallFrame* call_frame);
extern "C" R2P_EXPORT XLA_FFI_Error* jax_r2p_attention_backward_initialize(XLA_FFI_CallFrame* call_frame);
extern "C" R2P_EXPORT XLA_FFI_Error* jax_r2p_attention_backward_execute(XLA_FFI_CallFrame* call_frame);
extern "C" R2P_EXPORT XLA_FFI_Error* jax_r2p_attention_preprocess_initialize(XLA_FFI_CallFrame* call_frame);
extern "C" R2P_EXPORT XLA_FFI_Error* jax_r2p_attention_preprocess_execute(XLA_FFI_CallFrame* call_frame);

namespace jax_r2p {
namespace {

ffi::Error ToError(const Status& status) {
  switch (status.code()) {
    case R2P_OK: return ffi::Error::Success();
    case R2P_INVALID_ARGUMENT: return ffi::Error(ffi::ErrorCode::kInvalidArgument, status.message());
    case R2P_NOT_FOUND: return ffi::Error(ffi::ErrorCode::kNotFound, status.message());
    case R2P_FAILED_PRECONDITION: return ffi::Error(ffi::ErrorCode::kFailedPrecondition, status.message());
    case R2P_INTERNAL: return ffi::Error(ffi::ErrorCode::kInternal, status.message());
  }
  return ffi::Error(ffi::ErrorCode::kInternal, status.message());
}

Tensor ToTensor(const char* name, const ffi::AnyBuffer& buffer) {
  const ffi::AnyBuffer::Dimensions dims = buffer.dimensions();
  return Tensor{name, buffer.untyped_data(), static_cast<int32_t>(buffer.element_type()), dims.begin(),
                dims.size()};
}

AttentionCall ToCall(CUstream stream, const ffi::AnyBuffer& query, const ffi::AnyBuffer& key,
                     const ffi::AnyBuffer& value, const ffi::AnyBuffer& scale,
                     const ffi::AnyBuffer& query_lengths, const ffi::AnyBuffer& key_lengths,
                     std::string_view variant, int32_t window_left, int32_t window_right, int64_t kv_repeat,
                     int64_t kv_inner) {
  return AttentionCall{variant,
                       ToTensor("query", query),
                       ToTensor("key", key),
                       ToTensor("value", value),
                       ToTensor("scale", scale),
                       ToTensor("query_lengths", query_lengths),
                       ToTensor("key_lengths", key_lengths),
                       window_left,
                       window_right,
                       kv_repeat,
                       kv_inner,
                       stream};
}

ffi::Error Initialize(CUstream stream, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  return ToError(WithoutExceptions([&]() -> Status {
    const ffi::ErrorOr<std::string_view> variant = attributes.get<std::string_view>("variant");
    if (!variant.has_value()) {
      return InvalidArgument("variant: expected a string attribute; ", variant.error().message());
    }
    return Load(*variant, stream);
  }));
}

}  // namespace
}  // namespace jax_r2p

// XLA runs these before each run of an executable, on each device, and before it captures a command buffer.
// API 0.1 wants a handler of any stage to take all arguments, results and attributes of the call.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_r2p_attention_forward_initialize, jax_r2p::Initialize,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<ffi::Dictionary>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_r2p_attention_backward_initialize, jax_r2p::Initialize,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<ffi::Dictionary>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_r2p_attention_preprocess_initialize, jax_r2p::Initialize,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<ffi::Dictionary>());

namespace jax_r2p {
namespace {

ffi::Error ExecuteForward(CUstream stream, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value,
                          ffi::AnyBuffer scale, ffi::AnyBuffer query_lengths, ffi::AnyBuffer key_lengths,
                          ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                          std::string_view variant, int32_t window_left, int32_t window_right,
                          int64_t kv_repeat, int64_t kv_inner) {
  return ToError(WithoutExceptions([&] {
    const AttentionCall call = ToCall(stream, query, key, value, scale, query_lengths, key_lengths, variant,
                                      window_left, window_right, kv_repeat, kv_inner);
    return LaunchForward(ForwardRequest{call, ToTensor("out", *out), ToTensor("lse", *lse)});
  }));
}

}  // namespace
}  // namespace jax_r2p

// Every buffer is bound as AnyBuffer, so that a wrong dtype or rank is reported by the launcher, with the
// name of the argument. The trait holds: what is launched depends on shapes, attributes and addresses, never
// on contents, and nothing is allocated or waited for.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_r2p_attention_forward_execute, jax_r2p::ExecuteForward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()  // query
                                  .Arg<ffi::AnyBuffer>()  // key
                                  .Arg<ffi::AnyBuffer>()  // value
                                  .Arg<ffi::AnyBuffer>()  // scale
                                  .Arg<ffi::AnyBuffer>()  // query_lengths
                                  .Arg<ffi::AnyBuffer>()  // key_lengths
                                  .Ret<ffi::AnyBuffer>()  // out
                                  .Ret<ffi::AnyBuffer>()  // lse
                                  .Attr<std::string_view>("variant")
                                  .Attr<int32_t>("window_left")
                                  .Attr<int32_t>("window_right")
                                  .Attr<int64_t>("kv_repeat")
                                  .Attr<int64_t>("kv_inner"),
                              {ffi::Traits::kCmdBufferCompatible});

namespace jax_r2p {
namespace {

ffi::Error ExecuteBackward(CUstream stream, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value,
                           ffi::AnyBuffer dout, ffi::AnyBuffer lse, ffi::AnyBuffer delta,
                           ffi::AnyBuffer scale, ffi::AnyBuffer dquery_factor, ffi::AnyBuffer query_lengths,
                           ffi::AnyBuffer key_lengths, ffi::AnyBuffer sums_zeros, ffi::AnyBuffer marks_zeros,
                           ffi::Result<ffi::AnyBuffer> dquery, ffi::Result<ffi::AnyBuffer> dkey,
                           ffi::Result<ffi::AnyBuffer> dvalue, ffi::Result<ffi::AnyBuffer> sums,
                           ffi::Result<ffi::AnyBuffer> marks, std::string_view variant, int32_t window_left,
                           int32_t window_right, int64_t kv_repeat, int64_t kv_inner, int64_t together,
                           int64_t lag, bool deterministic) {
  return ToError(WithoutExceptions([&] {
    const AttentionCall call = ToCall(stream, query, key, value, scale, query_lengths, key_lengths, variant,
                                      window_left, window_right, kv_repeat, kv_inner);
    return LaunchBackward(
        BackwardRequest{call, ToTensor("dout", dout), ToTensor("lse", lse), ToTensor("delta", delta),
                        ToTensor("dquery_factor", dquery_factor), ToTensor("sums_zeros", sums_zeros),
                        ToTensor("marks_zeros", marks_zeros), ToTensor("dquery", *dquery),
                        ToTensor("dkey", *dkey), ToTensor("dvalue", *dvalue), ToTensor("sums", *sums),
                        ToTensor("marks", *marks), together, lag, deterministic});
  }));
}

}  // namespace
}  // namespace jax_r2p

// As above. The results sums and marks are the memory of the operands that hold their zeros.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_r2p_attention_backward_execute, jax_r2p::ExecuteBackward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()  // query
                                  .Arg<ffi::AnyBuffer>()  // key
                                  .Arg<ffi::AnyBuffer>()  // value
                                  .Arg<ffi::AnyBuffer>()  // dout
                                  .Arg<ffi::AnyBuffer>()  // lse
                                  .Arg<ffi::AnyBuffer>()  // delta
                                  .Arg<ffi::AnyBuffer>()  // scale
                                  .Arg<ffi::AnyBuffer>()  // dquery_factor
                                  .Arg<ffi::AnyBuffer>()  // query_lengths
                                  .Arg<ffi::AnyBuffer>()  // key_lengths
                                  .Arg<ffi::AnyBuffer>()  // sums_zeros
                                  .Arg<ffi::AnyBuffer>()  // marks_zeros
                                  .Ret<ffi::AnyBuffer>()  // dquery
                                  .Ret<ffi::AnyBuffer>()  // dkey
                                  .Ret<ffi::AnyBuffer>()  // dvalue
                                  .Ret<ffi::AnyBuffer>()  // sums
                                  .Ret<ffi::AnyBuffer>()  // marks
                                  .Attr<std::string_view>("variant")
                                  .Attr<int32_t>("window_left")
                                  .Attr<int32_t>("window_right")
                                  .Attr<int64_t>("kv_repeat")
                                  .Attr<int64_t>("kv_inner")
                                  .Attr<int64_t>("together")
                                  .Attr<int64_t>("lag")
                                  .Attr<bool>("deterministic"),
                              {ffi::Traits::kCmdBufferCompatible});

namespace jax_r2p {
namespace {

ffi::Error ExecutePreprocess(CUstream stream, ffi::AnyBuffer out, ffi::AnyBuffer dout, ffi::AnyBuffer lse,
                             ffi::AnyBuffer dlse, ffi::AnyBuffer query_lengths,
                             ffi::Result<ffi::AnyBuffer> lse_base2, ffi::Result<ffi::AnyBuffer> delta,
                             ffi::Result<ffi::AnyBuffer> sums, ffi::Result<ffi::AnyBuffer> marks,
                             std::string_view variant) {
  return ToError(WithoutExceptions([&] {
    return LaunchPreprocess(PreprocessRequest{
        variant, ToTensor("out", out), ToTensor("dout", dout), ToTensor("lse", lse), ToTensor("dlse", dlse),
        ToTensor("query_lengths", query_lengths), ToTensor("lse_base2", *lse_base2),
        ToTensor("delta", *delta), ToTensor("sums", *sums), ToTensor("marks", *marks), stream});
  }));
}

}  // namespace
}  // namespace jax_r2p

// As above.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_r2p_attention_preprocess_execute, jax_r2p::ExecutePreprocess,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Arg<ffi::AnyBuffer>()  // out
                                  .Arg<ffi::AnyBuffer>()  // dout
                                  .Arg<ffi::AnyBuffer>()  // lse
                                  .Arg<ffi::AnyBuffer>()  // dlse
                                  .Arg<ffi::AnyBuffer>()  // query_lengths
                                  .Ret<ffi::AnyBuffer>()  // lse_base2
                                  .Ret<ffi::AnyBuffer>()  // delta
                                  .Ret<ffi::AnyBuffer>()  // sums
                                  .Ret<ffi::AnyBuffer>()  // marks
                                  .Attr<std::string_view>("variant"),
                              {ffi::Traits::kCmdBufferCompatible});

// The CUDA driver, found at run time: the library is not linked against libcuda, so that it loads on machines
// that have none.

#ifndef JAX_R2P_FFI_DRIVER_H_
#define JAX_R2P_FFI_DRIVER_H_

#include <cuda.h>

#include <string_view>

#include "status.h"

namespace jax_r2p {

// Every driver function in use. cuda.h renames some of them (cuCtxPushCurrent is cuCtxPushCurrent_v2); a name
// passed on through this list is expanded first, so that the pointer's type and the symbol looked up are of
// one version.
#define R2P_DRIVER_FUNCTIONS(FUNCTION)        \
  FUNCTION(cuGetErrorName)                    \
  FUNCTION(cuGetErrorString)                  \
  FUNCTION(cuStreamGetCtx)                    \
  FUNCTION(cuCtxGetCurrent)                   \
  FUNCTION(cuCtxPushCurrent)                  \
  FUNCTION(cuCtxPopCurrent)                   \
  FUNCTION(cuCtxGetId)                        \
  FUNCTION(cuCtxGetDevice)                    \
  FUNCTION(cuDeviceGetAttribute)              \
  FUNCTION(cuThreadExchangeStreamCaptureMode) \
  FUNCTION(cuLibraryLoadData)                 \
  FUNCTION(cuLibraryGetKernel)                \
  FUNCTION(cuLibraryUnload)                   \
  FUNCTION(cuKernelGetFunction)               \
  FUNCTION(cuFuncSetAttribute)                \
  FUNCTION(cuTensorMapEncodeTiled)            \
  FUNCTION(cuLaunchKernelEx)

struct Driver {
#define R2P_DECLARE(name) decltype(&::name) name = nullptr;
  R2P_DRIVER_FUNCTIONS(R2P_DECLARE)
#undef R2P_DECLARE
};

// The driver's functions; looked up once per process, at the first call.
// Error: FAILED_PRECONDITION naming the library or the missing symbol.
Status GetDriver(const Driver** driver);

// OK, or INTERNAL with the call, what it was for, and the driver's name and text of `result`.
Status CheckDriverCall(const Driver& driver, CUresult result, const char* call, std::string_view purpose);

// Calls driver.<function>(...) and returns an error that names it. `purpose` is evaluated only on failure.
#define R2P_DRIVER_CALL(driver, function, purpose, ...)                               \
  do {                                                                                \
    if (CUresult result_ = (driver).function(__VA_ARGS__); result_ != CUDA_SUCCESS) { \
      return ::jax_r2p::CheckDriverCall((driver), result_, #function, (purpose));     \
    }                                                                                 \
  } while (false)

// Runs `body`, which returns a Status, with `context` as the calling thread's current context, and puts the
// former one back whether `body` succeeds or not.
template <typename Body>
Status InContext(const Driver& driver, CUcontext context, Body&& body) {
  R2P_DRIVER_CALL(driver, cuCtxPushCurrent, "the stream's context", context);
  Status status = body();
  CUcontext popped = nullptr;
  const CUresult result = driver.cuCtxPopCurrent(&popped);
  return status.ok() ? CheckDriverCall(driver, result, "cuCtxPopCurrent", "the stream's context") : status;
}

// The context of `stream`; for the default streams, which belong to none, the calling thread's current
// context.
Status ContextOf(const Driver& driver, CUstream stream, CUcontext* context);

}  // namespace jax_r2p

#endif  // JAX_R2P_FFI_DRIVER_H_

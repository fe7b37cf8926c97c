#include "driver.h"

#include <dlfcn.h>

namespace jax_r2p {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

struct LoadedDriver {
  Driver functions;
  Status status;
};

Status LookUp(void* library, const char* symbol, void** address) {
  *address = dlsym(library, symbol);
  if (*address == nullptr) {
    return Status(R2P_FAILED_PRECONDITION, Text(kLibrary, " has no ", symbol,
                                                ": jax_r2p needs the NVIDIA driver of CUDA 12.0 or later"));
  }
  return Status();
}

Status LoadDriver(Driver* functions) {
  // RTLD_LOCAL: our handle, not a source of symbols for others. Never closed, since the functions stay in
  // use.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    return Status(R2P_FAILED_PRECONDITION, Text("cannot load the NVIDIA driver's ", kLibrary, ": ",
                                                reason != nullptr ? reason : "no reason given"));
  }
  void* address = nullptr;
#define R2P_SYMBOL_(name) #name
#define R2P_SYMBOL(name) R2P_SYMBOL_(name)
#define R2P_LOOK_UP(name)                                           \
  R2P_RETURN_IF_ERROR(LookUp(library, R2P_SYMBOL(name), &address)); \
  functions->name = reinterpret_cast<decltype(functions->name)>(address);
  R2P_DRIVER_FUNCTIONS(R2P_LOOK_UP)
#undef R2P_LOOK_UP
#undef R2P_SYMBOL
#undef R2P_SYMBOL_
  return Status();
}

}  // namespace

Status GetDriver(const Driver** driver) {
  // Filled in once, under the lock that C++ puts around the initialisation of a local static; constant
  // afterwards. On the heap so that it outlives threads that still run while the process exits.
  static const LoadedDriver& loaded = *[] {
    auto* fresh = new LoadedDriver;
    fresh->status = LoadDriver(&fresh->functions);
    return fresh;
  }();
  R2P_RETURN_IF_ERROR(loaded.status);
  *driver = &loaded.functions;
  return Status();
}

Status CheckDriverCall(const Driver& driver, CUresult result, const char* call, std::string_view purpose) {
  if (result == CUDA_SUCCESS) {
    return Status();
  }
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) {
    name = "unknown error";
  }
  if (driver.cuGetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) {
    text = "the driver has no text for it";
  }
  return Status(R2P_INTERNAL,
                Text(call, " failed for ", purpose, ": ", name, " (", static_cast<int>(result), "): ", text));
}

Status ContextOf(const Driver& driver, CUstream stream, CUcontext* context) {
  *context = nullptr;
  if (stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD) {
    R2P_DRIVER_CALL(driver, cuCtxGetCurrent, "a default stream", context);
    if (*context == nullptr) {
      return InvalidArgument(
          "stream: expected a CUDA stream, or a current CUDA context for the default stream; ",
          "got the default stream and no current context");
    }
    return Status();
  }
  R2P_DRIVER_CALL(driver, cuStreamGetCtx, "the call's stream", stream, context);
  return Status();
}

}  // namespace jax_r2p

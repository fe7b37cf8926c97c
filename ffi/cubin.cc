#include "cubin.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace jax_r2p {

struct VariantSlot {
  VariantSlot(Variant variant_in, std::string broken_in)
      : variant(std::move(variant_in)), broken(std::move(broken_in)) {}

  // Constant once the slot is in the table, so read without a lock.
  const Variant variant;
  const std::string broken;  // why the kernel cannot be had; empty when it can

  // Guards what follows: shared to read, exclusive to load.
  std::shared_mutex mutex;
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
  // By the id of the context and not by its address, which the driver may give to a later context.
  std::vector<std::pair<unsigned long long, LoadedKernel>> kernels;
};

namespace {

struct Table {
  std::shared_mutex mutex;
  std::map<std::string, std::unique_ptr<VariantSlot>, std::less<>> slots;
  std::atomic<uint64_t> loads{0};
};

// Never destroyed: handlers may still run on other threads while the process exits.
Table& GetTable() {
  static Table& table = *new Table;
  return table;
}

bool Equal(const Variant& a, const Variant& b) {
  const auto fields = [](const Variant& v) {
    return std::tie(v.name, v.entry, v.cubin, v.role, v.dtype, v.head_dim, v.value_head_dim, v.tile_m,
                    v.tile_n, v.threads, v.shared_memory, v.min_blocks, v.is_causal);
  };
  return fields(a) == fields(b);
}

Status Add(Variant variant, std::string broken) {
  Table& table = GetTable();
  std::unique_lock lock(table.mutex);
  const auto found = table.slots.find(variant.name);
  if (found == table.slots.end()) {
    std::string name = variant.name;
    table.slots.emplace(std::move(name),
                        std::make_unique<VariantSlot>(std::move(variant), std::move(broken)));
    return Status();
  }
  const VariantSlot& known = *found->second;
  if (Equal(known.variant, variant) && known.broken == broken) {
    return Status();
  }
  return InvalidArgument("variant: '", variant.name, "' is registered already, with other contents");
}

// The kernel in a context; null when it is not loaded there. Valid as long as the slot is locked.
const LoadedKernel* FindKernel(const VariantSlot& slot, unsigned long long context_id) {
  for (const auto& [id, kernel] : slot.kernels) {
    if (id == context_id) {
      return &kernel;
    }
  }
  return nullptr;
}

// Loads the cubin into the process and finds its kernel; neither belongs to a context.
Status LoadLibrary(const Driver& driver, VariantSlot* slot) {
  const Variant& variant = slot->variant;
  const std::string purpose = Text("variant '", variant.name, "'");
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
  R2P_DRIVER_CALL(driver, cuLibraryLoadData, purpose, &library, variant.cubin.data(), nullptr, nullptr, 0,
                  nullptr, nullptr, 0);
  const CUresult found = driver.cuLibraryGetKernel(&kernel, library, variant.entry.c_str());
  if (found != CUDA_SUCCESS) {
    // The first failure is the one to report.
    (void)driver.cuLibraryUnload(library);
    return CheckDriverCall(driver, found, "cuLibraryGetKernel",
                           Text(purpose, ", entry '", variant.entry, "'"));
  }
  slot->library = library;
  slot->kernel = kernel;
  return Status();
}

Status LoadKernel(const Driver& driver, VariantSlot* slot, LoadedKernel* kernel) {
  const Variant& variant = slot->variant;
  const std::string purpose = Text("variant '", variant.name, "'");
  if (slot->kernel == nullptr) {
    R2P_RETURN_IF_ERROR(LoadLibrary(driver, slot));
  }
  // Under lazy loading (CUDA_MODULE_LOADING, the default) the driver copies a kernel's code to the device
  // when its function handle is taken, which is here; a launch then has nothing left to load.
  CUfunction fresh = nullptr;
  R2P_DRIVER_CALL(driver, cuKernelGetFunction, purpose, &fresh, slot->kernel);
  // Without this a launch may not have more than 48 KiB.
  R2P_DRIVER_CALL(driver, cuFuncSetAttribute,
                  Text(purpose, ", ", variant.shared_memory, " bytes of shared memory"), fresh,
                  CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, variant.shared_memory);
  // All of the SM's memory that may be shared memory: variants with small tiles are meant to share an SM.
  // Where a kernel has none, all of it as cache, through which its loads go.
  const int carveout =
      variant.shared_memory == 0 ? CU_SHAREDMEM_CARVEOUT_MAX_L1 : CU_SHAREDMEM_CARVEOUT_MAX_SHARED;
  R2P_DRIVER_CALL(driver, cuFuncSetAttribute, Text(purpose, ", shared memory carveout"), fresh,
                  CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, carveout);
  CUdevice device = 0;
  int multiprocessors = 0;
  R2P_DRIVER_CALL(driver, cuCtxGetDevice, "the stream's context", &device);
  R2P_DRIVER_CALL(driver, cuDeviceGetAttribute, "the number of multiprocessors", &multiprocessors,
                  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
  *kernel = LoadedKernel{fresh, multiprocessors};
  return Status();
}

// Runs `body`, which returns a Status, with the thread's capture mode relaxed: loading may allocate device
// memory, and in the other modes that fails while any stream is being captured into a graph. A load is no
// part of the graph.
template <typename Body>
Status WithRelaxedCapture(const Driver& driver, Body&& body) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  R2P_DRIVER_CALL(driver, cuThreadExchangeStreamCaptureMode, "loading a kernel", &mode);
  Status status = body();
  const CUresult result = driver.cuThreadExchangeStreamCaptureMode(&mode);
  return status.ok()
             ? CheckDriverCall(driver, result, "cuThreadExchangeStreamCaptureMode", "loading a kernel")
             : status;
}

}  // namespace

Status AddVariant(Variant variant) { return Add(std::move(variant), std::string()); }

Status AddBrokenVariant(std::string name, std::string message) {
  Variant variant;
  variant.name = std::move(name);
  return Add(std::move(variant), std::move(message));
}

Status FindVariant(std::string_view name, VariantSlot** slot) {
  Table& table = GetTable();
  std::shared_lock lock(table.mutex);
  const auto found = table.slots.find(name);
  if (found == table.slots.end()) {
    std::string known;
    for (const auto& [known_name, ignored] : table.slots) {
      known += (known.empty() ? "'" : ", '") + known_name + "'";
    }
    return Status(R2P_NOT_FOUND, Text("variant: expected one of ",
                                      known.empty() ? "(none registered)" : known, "; got '", name, "'"));
  }
  if (!found->second->broken.empty()) {
    return Status(R2P_FAILED_PRECONDITION, found->second->broken);
  }
  *slot = found->second.get();
  return Status();
}

const Variant& GetVariant(const VariantSlot& slot) { return slot.variant; }

Status GetKernel(const Driver& driver, CUcontext context, VariantSlot* slot, LoadedKernel* kernel) {
  unsigned long long id = 0;
  R2P_DRIVER_CALL(driver, cuCtxGetId, "the stream's context", context, &id);
  {
    std::shared_lock lock(slot->mutex);
    if (const LoadedKernel* cached = FindKernel(*slot, id); cached != nullptr) {
      *kernel = *cached;
      return Status();
    }
  }
  std::unique_lock lock(slot->mutex);
  if (const LoadedKernel* cached = FindKernel(*slot, id); cached != nullptr) {  // loaded meanwhile
    *kernel = *cached;
    return Status();
  }
  LoadedKernel loaded;
  R2P_RETURN_IF_ERROR(WithRelaxedCapture(driver, [&] { return LoadKernel(driver, slot, &loaded); }));
  slot->kernels.emplace_back(id, loaded);
  GetTable().loads.fetch_add(1, std::memory_order_relaxed);
  *kernel = loaded;
  return Status();
}

uint64_t LoadCount() { return GetTable().loads.load(std::memory_order_relaxed); }

}  // namespace jax_r2p

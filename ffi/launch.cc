#include "launch.h"

#include <atomic>

namespace jax_r2p {
namespace {

std::atomic<uint64_t> launch_count{0};

}  // namespace

Status Load(std::string_view variant, CUstream stream) {
  VariantSlot* slot = nullptr;
  R2P_RETURN_IF_ERROR(FindVariant(variant, &slot));
  return WithKernel(slot, stream, [](const Driver&, const LoadedKernel&) { return Status(); });
}

Status Enqueue(const Driver& driver, const LoadedKernel& kernel, const Variant& variant, int64_t blocks,
               CUstream stream, void** parameters) {
  CUlaunchConfig config = {};
  config.gridDimX = static_cast<unsigned int>(blocks);
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
      Text("variant '", variant.name, "' with ", blocks, " blocks of ", variant.threads, " threads"), &config,
      kernel.function, parameters, nullptr);
  launch_count.fetch_add(1, std::memory_order_relaxed);
  return Status();
}

uint64_t LaunchCount() { return launch_count.load(std::memory_order_relaxed); }

}  // namespace jax_r2p

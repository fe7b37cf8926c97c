// Stands in for the run-time library under the compiler's own host code and keeps what that asks to launch.
//
// Linked together with the object file that the compiler exports, whose only undefined symbols these are.

#include <stdint.h>
#include <string.h>

#define MAX_PARAMETERS 64
#define MAX_PARAMETER_SIZE 128
#define MAX_ATTRIBUTES 8

// What the tests read; tests/host_launch.py has the same structure.
struct {
  int32_t launches;
  uint32_t grid[3];
  uint32_t block[3];
  int64_t shared_memory;
  uint64_t stream;
  uint32_t attribute_count;
  uint32_t attribute_ids[MAX_ATTRIBUTES];
  int32_t attribute_values[MAX_ATTRIBUTES];
  uint8_t parameters[MAX_PARAMETERS][MAX_PARAMETER_SIZE];
} captured;

// What the tests set before a launch: the sizes are in the cubin, not in the call.
int32_t parameter_count;
uint32_t parameter_sizes[MAX_PARAMETERS];

struct attribute {
  uint32_t id;
  uint32_t padding;
  int32_t value;  // of the kinds that are flags; the rest of it is not filled in then
  uint8_t rest[60];
};

struct launch_config {
  uint32_t grid[3];
  uint32_t block[3];
  int64_t shared_memory;
  uint64_t stream;
  const struct attribute* attributes;
  uint32_t attribute_count;
};

int32_t _cudaLaunchKernelEx(const struct launch_config* config, const void* kernel, void** parameters) {
  (void)kernel;
  ++captured.launches;
  memcpy(captured.grid, config->grid, sizeof(captured.grid));
  memcpy(captured.block, config->block, sizeof(captured.block));
  captured.shared_memory = config->shared_memory;
  captured.stream = config->stream;
  captured.attribute_count = config->attribute_count;
  for (uint32_t i = 0; i < config->attribute_count && i < MAX_ATTRIBUTES; ++i) {
    captured.attribute_ids[i] = config->attributes[i].id;
    captured.attribute_values[i] = config->attributes[i].value;
  }
  for (int32_t i = 0; i < parameter_count; ++i) {
    memcpy(captured.parameters[i], parameters[i], parameter_sizes[i]);
  }
  return 0;
}

// The rest only has to succeed. Two of them are asked for a number, of which any will do.

int32_t _cudaLibraryLoadData(void) { return 0; }
int32_t _cudaLibraryGetKernel(void) { return 0; }
int32_t _cudaFuncSetAttribute(void) { return 0; }
int32_t _cudaKernelSetAttributeForDevice(void) { return 0; }

int32_t _cuKernelGetAttribute(int32_t* value) {
  *value = 0;
  return 0;
}

int32_t _cudaDeviceGetAttribute(int32_t* value) {
  *value = 0;
  return 0;
}

int32_t _cudaGetDevice(int32_t* device) {
  *device = 0;
  return 0;
}

// A stand-in for libcuda.so.1 that records every call. It implements what ffi/driver.h looks up, with types
// of its own, so that building it needs no CUDA. A process that has loaded it hands it to every later
// dlopen("libcuda.so.1").
//
// Each call adds one line of JSON to the log. Fake handles:
//   stream s (above 0x2)  lives in context 0xC000000000000000 | s
//   context c             has the id (c & 0xffff...) + the base set by stub_set_id_base
//   library l, kernel k, function f: small numbers in order of creation, with a tag in the upper half
// A map gets the number of its encoding in its first 8 bytes, so that it can be found among the kernel's
// parameters.

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_PARAMETERS 64
#define MAX_DEPTH 16
#define MAX_FAILURES 8

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char* log_text = NULL;
static size_t log_size = 0;
static size_t log_capacity = 0;
static uint64_t handles = 0;
static uint64_t encodings = 0;
static uint64_t id_base = 0;
static int parameter_count = 0;
static uint32_t parameter_sizes[MAX_PARAMETERS];
static struct {
  char call[64];
  int code;
  int countdown;
} failures[MAX_FAILURES];
static int failure_count = 0;
static int unknown_errors = 0;
static int load_milliseconds = 0;

static __thread uint64_t contexts[MAX_DEPTH];
static __thread int depth = 0;
static __thread int capture_mode = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL

static void append(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(NULL, 0, format, arguments);
  va_end(arguments);
  if (log_size + (size_t)length + 1 > log_capacity) {
    log_capacity = 2 * (log_size + (size_t)length + 1);
    log_text = realloc(log_text, log_capacity);
    if (log_text == NULL) {
      abort();
    }
  }
  va_start(arguments, format);
  vsnprintf(log_text + log_size, (size_t)length + 1, format, arguments);
  va_end(arguments);
  log_size += (size_t)length;
}

// Starts a line and returns what the call has to return. Leaves the mutex locked.
static int begin(const char* call) {
  pthread_mutex_lock(&mutex);
  int code = 0;
  for (int i = 0; i < failure_count; ++i) {
    if (strcmp(call, failures[i].call) == 0 && --failures[i].countdown == 0) {
      code = failures[i].code;
    }
  }
  append("{\"call\": \"%s\", \"result\": %d, \"depth\": %d, \"capture_mode\": %d", call, code, depth,
         capture_mode);
  return code;
}

static int end(int code) {
  append("}\n");
  pthread_mutex_unlock(&mutex);
  return code;
}

static void append_numbers(const char* name, const uint64_t* values, int count) {
  append(", \"%s\": [", name);
  for (int i = 0; i < count; ++i) {
    append(i == 0 ? "%llu" : ", %llu", (unsigned long long)values[i]);
  }
  append("]");
}

static void append_numbers32(const char* name, const uint32_t* values, int count) {
  uint64_t wide[8];
  for (int i = 0; i < count; ++i) {
    wide[i] = values[i];
  }
  append_numbers(name, wide, count);
}

// For the tests: control and results.

// Calls to `call` succeed until the `nth` from now on (1: the next), which returns `code` and is the only one
// to fail.
void stub_fail(const char* call, int code, int nth) {
  pthread_mutex_lock(&mutex);
  if (failure_count == MAX_FAILURES) {
    abort();
  }
  snprintf(failures[failure_count].call, sizeof(failures[0].call), "%s", call);
  failures[failure_count].code = code;
  failures[failure_count].countdown = nth;
  ++failure_count;
  pthread_mutex_unlock(&mutex);
}

void stub_set_parameter_sizes(const uint32_t* sizes, int count) {
  if (count > MAX_PARAMETERS) {
    abort();
  }
  memcpy(parameter_sizes, sizes, (size_t)count * sizeof(*sizes));
  parameter_count = count;
}

void stub_set_id_base(uint64_t base) { id_base = base; }
void stub_set_load_milliseconds(int milliseconds) { load_milliseconds = milliseconds; }
void stub_set_unknown_errors(int unknown) { unknown_errors = unknown; }

// Makes `context` the calling thread's current one, as the only entry of its stack; 0 empties the stack.
void stub_set_current(uint64_t context) {
  depth = context != 0;
  contexts[0] = context;
}

void stub_set_capture_mode(int mode) { capture_mode = mode; }
int stub_capture_mode(void) { return capture_mode; }
int stub_depth(void) { return depth; }

// The log since the last call of this function; the caller frees it with stub_free.
char* stub_take_log(void) {
  pthread_mutex_lock(&mutex);
  append("%s", "");  // so that there is a text
  char* text = log_text;
  log_text = NULL;
  log_size = log_capacity = 0;
  pthread_mutex_unlock(&mutex);
  return text;
}

void stub_free(char* text) { free(text); }

// The driver.

int cuGetErrorName(int code, const char** name) {
  if (unknown_errors) {
    *name = NULL;
    return 1;
  }
  *name = code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_STUB";
  return 0;
}

int cuGetErrorString(int code, const char** text) {
  if (unknown_errors) {
    *text = NULL;
    return 1;
  }
  *text = code == 209 ? "no kernel image is available for execution on the device" : "made to fail";
  return 0;
}

int cuStreamGetCtx(uint64_t stream, uint64_t* context) {
  const int code = begin("cuStreamGetCtx");
  append(", \"stream\": %llu", (unsigned long long)stream);
  *context = UINT64_C(0xC000000000000000) | stream;
  return end(code);
}

int cuCtxGetCurrent(uint64_t* context) {
  const int code = begin("cuCtxGetCurrent");
  *context = depth > 0 ? contexts[depth - 1] : 0;
  return end(code);
}

int cuCtxPushCurrent_v2(uint64_t context) {
  const int code = begin("cuCtxPushCurrent");
  append(", \"context\": %llu", (unsigned long long)context);
  if (code == 0) {
    if (depth == MAX_DEPTH) {
      abort();
    }
    contexts[depth++] = context;
  }
  return end(code);
}

int cuCtxPopCurrent_v2(uint64_t* context) {
  const int code = begin("cuCtxPopCurrent");
  if (depth == 0) {
    abort();
  }
  *context = contexts[--depth];
  append(", \"context\": %llu", (unsigned long long)*context);
  return end(code);
}

int cuCtxGetId(uint64_t context, unsigned long long* id) {
  const int code = begin("cuCtxGetId");
  *id = (context & UINT64_C(0xffffffffffff)) + id_base;
  return end(code);
}

int cuCtxGetDevice(int* device) {
  const int code = begin("cuCtxGetDevice");
  *device = 3;
  append(", \"device\": %d", *device);
  return end(code);
}

// An H200 has 132 multiprocessors, attribute 16.
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const int code = begin("cuDeviceGetAttribute");
  *value = attribute == 16 ? 132 : -1;
  append(", \"attribute\": %d, \"device\": %d", attribute, device);
  return end(code);
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  const int code = begin("cuThreadExchangeStreamCaptureMode");
  append(", \"mode\": %d", *mode);
  const int former = capture_mode;
  if (code == 0) {
    capture_mode = *mode;
    *mode = former;
  }
  return end(code);
}

int cuLibraryLoadData(uint64_t* library, const void* data, const void* jit_options, const void* jit_values,
                      unsigned jit_count, const void* options, const void* values, unsigned count) {
  (void)jit_options;
  (void)jit_values;
  (void)options;
  (void)values;
  const struct timespec pause = {load_milliseconds / 1000, load_milliseconds % 1000 * 1000000L};
  nanosleep(&pause, NULL);
  const int code = begin("cuLibraryLoadData");
  *library = 0x1000000000 + ++handles;
  append(", \"library\": %llu, \"magic\": \"%.3s\", \"options\": %u", (unsigned long long)*library,
         (const char*)data + 1, jit_count + count);
  return end(code);
}

int cuLibraryGetKernel(uint64_t* kernel, uint64_t library, const char* name) {
  const int code = begin("cuLibraryGetKernel");
  *kernel = 0x2000000000 + ++handles;
  append(", \"library\": %llu, \"name\": \"%s\", \"kernel\": %llu", (unsigned long long)library, name,
         (unsigned long long)*kernel);
  return end(code);
}

int cuLibraryUnload(uint64_t library) {
  const int code = begin("cuLibraryUnload");
  append(", \"library\": %llu", (unsigned long long)library);
  return end(code);
}

int cuKernelGetFunction(uint64_t* function, uint64_t kernel) {
  const int code = begin("cuKernelGetFunction");
  *function = 0x3000000000 + ++handles;
  append(", \"kernel\": %llu, \"function\": %llu, \"context\": %llu", (unsigned long long)kernel,
         (unsigned long long)*function, (unsigned long long)(depth > 0 ? contexts[depth - 1] : 0));
  return end(code);
}

int cuFuncSetAttribute(uint64_t function, int attribute, int value) {
  const int code = begin("cuFuncSetAttribute");
  append(", \"function\": %llu, \"attribute\": %d, \"value\": %d", (unsigned long long)function, attribute,
         value);
  return end(code);
}

int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, uint64_t address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                           int interleave, int swizzle, int promotion, int fill) {
  const int code = begin("cuTensorMapEncodeTiled");
  const uint64_t number = ++encodings;
  memset(map, 0, 128);
  memcpy(map, &number, sizeof(number));
  append(", \"number\": %llu, \"type\": %d, \"rank\": %u, \"address\": %llu", (unsigned long long)number,
         type, rank, (unsigned long long)address);
  append_numbers("dims", dims, (int)rank);
  append_numbers("strides", strides, (int)rank - 1);
  append_numbers32("box", box, (int)rank);
  append_numbers32("element_strides", element_strides, (int)rank);
  append(", \"interleave\": %d, \"swizzle\": %d, \"promotion\": %d, \"fill\": %d, \"aligned\": %s",
         interleave, swizzle, promotion, fill, (uintptr_t)map % 64 == 0 ? "true" : "false");
  return end(code);
}

// CUlaunchConfig.
struct launch_config {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_memory;
  uint64_t stream;
  const void* attributes;
  uint32_t attribute_count;
};

int cuLaunchKernelEx(const struct launch_config* config, uint64_t function, void** parameters, void** extra) {
  const int code = begin("cuLaunchKernelEx");
  append_numbers32("grid", config->grid, 3);
  append_numbers32("block", config->block, 3);
  append(", \"shared_memory\": %u, \"stream\": %llu, \"attributes\": %u, \"extra\": %s, \"function\": %llu",
         config->shared_memory, (unsigned long long)config->stream, config->attribute_count,
         extra == NULL ? "false" : "true", (unsigned long long)function);
  append(", \"context\": %llu, \"parameters\": [", (unsigned long long)(depth > 0 ? contexts[depth - 1] : 0));
  for (int i = 0; i < parameter_count; ++i) {
    append(i == 0 ? "\"" : ", \"");
    for (uint32_t j = 0; j < parameter_sizes[i]; ++j) {
      append("%02x", ((const unsigned char*)parameters[i])[j]);
    }
    append("\"");
  }
  append("]");
  return end(code);
}

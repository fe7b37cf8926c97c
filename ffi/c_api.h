// C interface of libjax_r2p.so for Python's ctypes: registration of kernel variants, and entry points that
// reach the launcher without XLA.
//
// Every function returns R2P_OK or another R2pCode. On failure it writes a zero-terminated text of at most
// `error_size` bytes to `error` (which may be null). No function throws, blocks on the device or frees an
// argument. All of them may be called from several threads at once. Strings are zero-terminated UTF-8.

#ifndef JAX_R2P_FFI_C_API_H_
#define JAX_R2P_FFI_C_API_H_

#include <stddef.h>
#include <stdint.h>

#define R2P_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef enum R2pCode {
  R2P_OK = 0,
  R2P_INVALID_ARGUMENT = 1,     // an argument breaks a rule; the text names it, with expected and got
  R2P_NOT_FOUND = 2,            // no variant of that name is registered; the text lists those that are
  R2P_FAILED_PRECONDITION = 3,  // the variant's file is missing or altered; or there is no usable driver
  R2P_INTERNAL = 4,             // a driver call failed; the text names the call and the driver's reason
} R2pCode;

// Element types, in XLA's numbering (XLA_FFI_DataType). Only these may be right; any other number is refused
// by name.
typedef enum R2pDtype {
  R2P_S32 = 4,
  R2P_F16 = 10,
  R2P_F32 = 11,
  R2P_BF16 = 16,
} R2pDtype;

// What a kernel computes.
typedef enum R2pRole {
  R2P_FORWARD = 1,     // attention
  R2P_BACKWARD = 2,    // the cotangents of query, key and value
  R2P_PREPROCESS = 3,  // what a backward kernel reads besides the arrays of the call
} R2pRole;

// One kernel parameter as the manifest states it.
typedef struct R2pParameter {
  const char* name;
  uint32_t size;  // bytes
} R2pParameter;

// One kernel: a row of the manifest with the bytes of its cubin.
typedef struct R2pVariant {
  size_t struct_size;              // sizeof(R2pVariant) of the caller; refused if the library has another
  const char* name;                // "fwd_bf16_d128_causal"
  const char* entry;               // symbol of the kernel in the cubin
  const void* cubin;               // copied
  size_t cubin_size;               // bytes
  int32_t role;                    // R2pRole
  int32_t dtype;                   // R2pDtype of query, key, value and out: R2P_BF16 or R2P_F16
  int32_t head_dim;                // elements; the widest head of query and key it takes; preprocess: unused
  int32_t value_head_dim;          // likewise of value and out
  int32_t tile_m;                  // query rows a thread block handles; backward: in one step
  int32_t tile_n;                  // keys in one block of keys; backward: of a thread block; preprocess: 0
  int32_t threads;                 // threads of a thread block
  int32_t shared_memory;           // bytes of dynamic shared memory
  int32_t min_blocks;              // thread blocks that an SM holds together
  int32_t is_causal;               // forward: 1 if the kernel applies the causal mask, else 0
  const R2pParameter* parameters;  // must equal the list of the role, parameters_*.def
  size_t parameter_count;
} R2pVariant;

// One array: device address, element type and row-major shape.
typedef struct R2pTensor {
  void* data;
  int32_t dtype;  // R2pDtype
  int32_t rank;   // at most 4
  int64_t dims[4];
} R2pTensor;

// One call of the forward kernel.
typedef struct R2pLaunch {
  size_t struct_size;  // sizeof(R2pLaunch), as above
  const char* variant;
  R2pTensor query;          // (B, T, N, H)
  R2pTensor key;            // (Bk, S, K, H)
  R2pTensor value;          // (Bk, S, K, Hv)
  R2pTensor scale;          // float32 scalar in device memory
  R2pTensor query_lengths;  // (B,), int32: rows of each sequence, clamped to 0..T; or (0,): all
  R2pTensor key_lengths;    // (B,), int32: keys of each sequence, clamped to 0..S; or (0,): all
  R2pTensor out;            // (B, T, N, Hv)
  R2pTensor lse;            // (B, N, T), float32
  int32_t window_left;      // keys visible before the diagonal, 0..2^29; 2^29 = all
  int32_t window_right;     // keys visible after the diagonal, 0..2^29; 2^29 = all
  int64_t kv_repeat;        // B == Bk * kv_repeat; query batch b reads key batch
  int64_t kv_inner;         //   b / (kv_repeat * kv_inner) * kv_inner + b % kv_inner
  void* stream;             // CUstream
} R2pLaunch;

// One call of the backward kernel. Tp is T rounded up to a multiple of the variant's tile_m, W its head_dim.
// lse, delta and the zeros of sums and marks are results of R2pPreprocess.
//
// The sums of dquery are in a ring of `slots` slots, each with those of one head of query at a time: head n,
// in the order of key's heads, then of those that share its keys, is use n / slots of slot n % slots. The
// thread blocks of `together` heads of key start in turn, and then those of the next. They also turn the sums
// of the heads `lag` times as many before their own into dquery, and leave zeros there.
typedef struct R2pBackward {
  size_t struct_size;  // sizeof(R2pBackward), as above
  const char* variant;
  R2pTensor query;          // (B, T, N, H)
  R2pTensor key;            // (Bk, S, K, H)
  R2pTensor value;          // (Bk, S, K, Hv)
  R2pTensor dout;           // (B, T, N, Hv)
  R2pTensor lse;            // (B, N, Tp), float32: in base 2; +inf for a row that sees no key or is not there
  R2pTensor delta;          // (B, N, Tp), float32: 0 for such a row
  R2pTensor scale;          // as in R2pLaunch
  R2pTensor dquery_factor;  // float32 scalar in device memory: what sums of dquery are multiplied by
  R2pTensor query_lengths;  // as in R2pLaunch
  R2pTensor key_lengths;    // likewise
  R2pTensor sums_zeros;     // (slots, Tp / tile_m, tile_m * W), float32: zeros, the memory of sums
  R2pTensor marks_zeros;    // (slots, 2 + Tp / tile_m), int32: zeros, the memory of marks
  R2pTensor dquery;         // as query; 0 in rows that see no key or are not there
  R2pTensor dkey;           // as key
  R2pTensor dvalue;         // as value
  R2pTensor sums;           // the elements of a tile are in the order of the kernel's registers
  R2pTensor marks;          // see parameters_backward.def
  int32_t window_left;      // these four as in R2pLaunch
  int32_t window_right;
  int64_t kv_repeat;
  int64_t kv_inner;
  int64_t together;       // 1..Bk * K; with G = ceil(Bk * K / together):
  int64_t lag;            // 1..G; min((lag + 1) * together * B * N / (Bk * K), B * N) <= slots <= B * N
  int32_t deterministic;  // 1 if sums are to be added in a fixed order, else 0
  void* stream;           // CUstream
} R2pBackward;

// One call of the preprocess kernel. Tp is T rounded up to whole tiles of the backward kernel, which takes
// the results: slots, tiles and the elements of a tile are as in R2pBackward.
typedef struct R2pPreprocess {
  size_t struct_size;  // sizeof(R2pPreprocess), as above
  const char* variant;
  R2pTensor out;            // (B, T, N, Hv)
  R2pTensor dout;           // as out: its cotangent
  R2pTensor lse;            // (B, N, T), float32: natural log; -inf for a row that sees no key
  R2pTensor dlse;           // as lse: its cotangent
  R2pTensor query_lengths;  // as in R2pLaunch
  R2pTensor lse_base2;      // (B, N, Tp), float32, T <= Tp < T + tile_m: lse as R2pBackward has it
  R2pTensor delta;          // likewise: the sum of dout * out over a row, minus dlse
  R2pTensor sums;           // (slots, tiles, elements of a tile, a multiple of 4), float32: becomes zeros
  R2pTensor marks;          // (slots, 2 + tiles), int32: likewise
  void* stream;             // CUstream
} R2pPreprocess;

// What the process has done so far, for tests: kernels loaded (one per variant and CUDA context), kernels
// launched.
typedef struct R2pCounters {
  uint64_t loads;
  uint64_t launches;
} R2pCounters;

// Registers a kernel. Registering the same one again is no error; another one under a known name is.
R2P_EXPORT int r2p_add_variant(const R2pVariant* variant, char* error, size_t error_size);

// Registers a name whose kernel cannot be had. A call that needs it fails with `message`.
R2P_EXPORT int r2p_add_broken_variant(const char* name, const char* message, char* error, size_t error_size);

// What the FFI `initialize` handlers do: loads the kernel in the context of `stream`.
R2P_EXPORT int r2p_load(const char* variant, void* stream, char* error, size_t error_size);

// What the FFI `execute` handlers do: check, pack and enqueue one launch.
R2P_EXPORT int r2p_launch(const R2pLaunch* launch, char* error, size_t error_size);
R2P_EXPORT int r2p_launch_backward(const R2pBackward* launch, char* error, size_t error_size);
R2P_EXPORT int r2p_launch_preprocess(const R2pPreprocess* launch, char* error, size_t error_size);

R2P_EXPORT void r2p_counters(R2pCounters* counters);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // JAX_R2P_FFI_C_API_H_

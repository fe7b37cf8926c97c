// Division by a number known before the launch, the way the kernels do it: one multiplication and two shifts.

#ifndef JAX_R2P_FFI_FAST_DIVMOD_H_
#define JAX_R2P_FFI_FAST_DIVMOD_H_

#include <cstdint>

namespace jax_r2p {

// The layout of CuTeDSL's FastDivmodDivisor. With h = the high half of the 64-bit product n * multiplier,
//   n / divisor == (h + ((n - h) >> shift1)) >> shift2.
struct FastDivmod {
  uint32_t divisor;
  uint32_t multiplier;
  uint8_t shift1;
  uint8_t shift2;
  uint8_t padding[2];
};
static_assert(sizeof(FastDivmod) == 12 && alignof(FastDivmod) == 4);

// The divisor `divisor`, 1..2^31-1.
constexpr FastDivmod MakeFastDivmod(int32_t divisor) {
  const uint32_t d = static_cast<uint32_t>(divisor);
  uint32_t bits = 0;  // ceil(log2(d))
  while ((uint64_t{1} << bits) < d) {
    ++bits;
  }
  const uint64_t excess = (uint64_t{1} << bits) - d;
  const uint64_t multiplier = (excess << 32) / d + 1;  // below 2^32, since excess < d
  const uint8_t shift1 = bits == 0 ? 0 : 1;
  const uint8_t shift2 = static_cast<uint8_t>(bits - shift1);
  return FastDivmod{d, static_cast<uint32_t>(multiplier), shift1, shift2, {0, 0}};
}

}  // namespace jax_r2p

#endif  // JAX_R2P_FFI_FAST_DIVMOD_H_

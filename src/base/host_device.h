// Macros and functions shared by CPU and CUDA code, and the two differences between the compilers
// that shared code depends on. __CUDA_ARCH__ appears in this folder only.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define NF_HOST_DEVICE __host__ __device__
// Declares `name`, the CTA's dynamic shared memory, as an array. It is not a function that returns
// the address, because that changes the register allocation of kernels.
#define NF_DYNAMIC_SHARED(Type, name, alignment) \
  extern __shared__ __align__(alignment)         \
  Type name[]
#else
#define NF_HOST_DEVICE
#endif

// Unrolls the loop that follows, in device code: its counter indexes registers.
#if defined(__CUDA_ARCH__)
#define NF_UNROLL _Pragma("unroll")
#else
#define NF_UNROLL
#endif

namespace narrowfloat {

// Whether device code is being compiled for an architecture that converts fp32 to E2M1 in one
// instruction. False in host code.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
inline constexpr bool kHasE2m1Conversion = true;
#else
inline constexpr bool kHasE2m1Conversion = false;
#endif

// Whether device code is being compiled for an architecture whose own instructions the kernels use:
// Hopper, or Blackwell, which has those of Hopper but wgmma. Otherwise it is the portable code,
// which runs from compute capability 8.0 on (decision 0039). False in host code.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM103_ALL)
inline constexpr bool kHasHopperInstructions = true;
#else
inline constexpr bool kHasHopperInstructions = false;
#endif

// Whether device code is being compiled for Hopper's own instructions: wgmma, and setmaxnreg, which
// moves registers between warpgroups. False in host code.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kHasWgmma = true;
#else
inline constexpr bool kHasWgmma = false;
#endif

// std::bit_cast is not callable from device code (without relaxed-constexpr), the builtin is.
template <typename To, typename From>
NF_HOST_DEVICE constexpr To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From) && std::is_trivially_copyable_v<From>);
  return __builtin_bit_cast(To, from);
}

NF_HOST_DEVICE constexpr uint32_t float_bits(float value) { return bit_cast<uint32_t>(value); }
NF_HOST_DEVICE constexpr float bits_float(uint32_t bits) { return bit_cast<float>(bits); }

// NaN results are stored as 0x7FFFFFFF whatever their sign and payload (spec 4.6).
NF_HOST_DEVICE constexpr float canonical_nan(float value) {
  return (float_bits(value) & 0x7FFFFFFFU) > 0x7F800000U ? bits_float(0x7FFFFFFFU) : value;
}

// 2^exponent for exponents of normal numbers, -126 to 127.
NF_HOST_DEVICE constexpr float power_of_two(int exponent) {
  return bits_float(static_cast<uint32_t>(exponent + 127) << 23);
}

}  // namespace narrowfloat

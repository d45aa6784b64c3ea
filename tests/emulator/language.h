// CUDA's language and built-in functions for a C++ compiler, so that kernels run on the CPU: the
// names that nvcc knows without a header. Included before every .cu file (docs/testing.md, "Kernels
// without a GPU").
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <cuda_runtime.h>

#include "emulator/machine.h"

#define NF_DYNAMIC_SHARED(Type, name, alignment) \
  auto* const name = reinterpret_cast<Type*>(::emulator::dynamic_shared())

#undef __shared__
#define __shared__ static  // One CTA runs at a time; clusters have dynamic shared memory alone.
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __maxnreg__
#define __maxnreg__(...)
#define __builtin_assume(condition)
#define __noinline__

// The built-in variables of the thread that runs.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

// Launches are typed: the emulator calls the kernel.
template <class... Params, class... Args>
cudaError_t emulated_launch(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                            const Args&... args) {
  return ::emulator::launch(*config, reinterpret_cast<const void*>(kernel),
                            [=] { kernel(args...); });
}
#define cudaLaunchKernelEx emulated_launch

// --- Warps ---------------------------------------------------------------------------------------

namespace emulator {

template <class T, class Pick>
T exchange(unsigned mask, T value, Pick&& pick) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const LaneValues& lanes = exchange_lanes(mask, bits);
  const auto of = [&](int lane) {
    T result;
    std::memcpy(&result, &lanes.bits[lane], sizeof(T));
    return result;
  };
  return pick(of, lanes.present);
}

}  // namespace emulator

inline void __syncthreads() { ::emulator::sync_block(); }
inline int __syncthreads_or(int predicate) { return ::emulator::sync_block_or(predicate); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFU) { ::emulator::exchange_lanes(mask, 0); }

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  const int first = ::emulator::lane() / width * width;
  return ::emulator::exchange(mask, value,
                              [&](auto of, unsigned) { return of(first + lane % width); });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  const int other = ::emulator::lane() ^ distance;
  return ::emulator::exchange(mask, value, [&](auto of, unsigned) { return of(other); });
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  const int other = ::emulator::lane() - static_cast<int>(distance);
  return ::emulator::exchange(mask, value,
                              [&](auto of, unsigned) { return other < 0 ? value : of(other); });
}
template <class T, class Better>
T emulated_reduce(unsigned mask, T value, Better&& better) {
  return ::emulator::exchange(mask, value, [&](auto of, unsigned present) {
    T best = value;
    for (int i = 0; i < 32; ++i) {
      if ((present >> i & 1U) != 0 && better(of(i), best)) best = of(i);
    }
    return best;
  });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return emulated_reduce(mask, value, [](unsigned a, unsigned b) { return a > b; });
}
inline int __reduce_max_sync(unsigned mask, int value) {
  return emulated_reduce(mask, value, [](int a, int b) { return a > b; });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
  return emulated_reduce(mask, value, [](unsigned a, unsigned b) { return a < b; });
}
inline int __reduce_min_sync(unsigned mask, int value) {
  return emulated_reduce(mask, value, [](int a, int b) { return a < b; });
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return ::emulator::exchange(mask, predicate, [&](auto of, unsigned present) {
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) {
      if ((present >> i & 1U) != 0 && of(i) != 0) result |= 1U << i;
    }
    return static_cast<int>(result);
  });
}

// --- Arithmetic: the host's is IEEE's, never contracted -----------------------------------------

// A NaN that arithmetic makes has these bits on a GPU.
inline float emulated_nan(float a) { return a != a ? __builtin_bit_cast(float, 0x7FFFFFFF) : a; }
inline float __fmul_rn(float a, float b) { return emulated_nan(a * b); }
inline float __fadd_rn(float a, float b) { return emulated_nan(a + b); }
inline float __fdiv_rn(float a, float b) { return emulated_nan(a / b); }
inline float __frcp_rn(float a) { return emulated_nan(1.0F / a); }
inline float __fmaf_rn(float a, float b, float c) { return emulated_nan(std::fma(a, b, c)); }
inline float __frsqrt_rn(float a) {
  return emulated_nan(static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))));
}
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline double __hiloint2double(int high, int low) {
  const uint64_t bits =
      static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low);
  return __builtin_bit_cast(double, bits);
}
inline int __double2loint(double a) { return static_cast<int>(__builtin_bit_cast(uint64_t, a)); }
inline int __double2hiint(double a) {
  return static_cast<int>(__builtin_bit_cast(uint64_t, a) >> 32);
}

// A number wins over every NaN; the host's fmaxf() and fminf() let a signalling one win.
inline float emulated_fmax(float a, float b) {
  if (a != a || b != b) return a != a ? b : a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
inline float emulated_fmin(float a, float b) { return -emulated_fmax(-a, -b); }
#define fmaxf emulated_fmax
#define fminf emulated_fmin

constexpr int min(int a, int b) { return a < b ? a : b; }
constexpr int max(int a, int b) { return a > b ? a : b; }
constexpr unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
constexpr unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
constexpr long min(long a, long b) { return a < b ? a : b; }
constexpr long max(long a, long b) { return a > b ? a : b; }
constexpr unsigned long min(unsigned long a, unsigned long b) { return a < b ? a : b; }
constexpr unsigned long max(unsigned long a, unsigned long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

// --- Integers ------------------------------------------------------------------------------------

inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline unsigned __brev(unsigned a) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= (a >> i & 1U) << (31 - i);
  return result;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  return ::emulator::permute_bytes(a, b, selector);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31U));
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  const unsigned low = max(a & 0xFFFFU, b & 0xFFFFU);
  return max(a >> 16, b >> 16) << 16 | low;
}
inline unsigned __vcmpne4(unsigned a, unsigned b) {
  unsigned result = 0;
  for (int i = 0; i < 32; i += 8) {
    if ((a >> i & 0xFFU) != (b >> i & 0xFFU)) result |= 0xFFU << i;
  }
  return result;
}

// --- Memory --------------------------------------------------------------------------------------

template <class T>
T __ldcg(const T* address) {
  return *address;
}
inline bool __isGlobal(const void*) { return true; }

template <class T, class U>
T atomicAdd(T* address, U value) {
  const T before = *address;
  *address = before + static_cast<T>(value);
  return before;
}
template <class T, class U>
T atomicMax(T* address, U value) {
  const T before = *address;
  if (static_cast<T>(value) > before) *address = static_cast<T>(value);
  return before;
}
template <class T, class U>
T atomicMin(T* address, U value) {
  const T before = *address;
  if (static_cast<T>(value) < before) *address = static_cast<T>(value);
  return before;
}
template <class T, class U>
T atomicOr(T* address, U value) {
  const T before = *address;
  *address = before | static_cast<T>(value);
  return before;
}

// The levels of x86 vector instructions that implementations on the CPU are compiled for, and
// whether this CPU has them.
#pragma once

#include <cstdint>

#include "runtime/support.h"

namespace narrowfloat {

enum class VectorLevel : int {
  kAvx2,        // AVX2, FMA, F16C: x86-64-v3
  kAvx512,      // AVX-512 F, BW, VL, DQ, VBMI and VNNI
  kAvx512Bf16,  // and AVX-512 BF16
  kAmxBf16,     // and AMX TILE and BF16, whose state a process takes with take_tiles()
  kAmxInt8,     // and AMX INT8
};

// Outputs of more bytes do not stay in the caches, so the kernels of a level write past them.
inline constexpr int64_t kStreamedBytes = 16 << 20;

// A CPU reports any of these; a level needs all of those before it as well. `amx_bf16` and
// `amx_int8` say that Linux (5.16 or later) knows the tiles' state, too.
struct VectorFeatures {
  bool avx2 = false;
  bool avx512 = false;
  bool avx512_bf16 = false;
  bool amx_bf16 = false;
  bool amx_int8 = false;
};
// The condition of code that is compiled for `level` on a CPU with `features`.
Support support_of(VectorLevel level, const VectorFeatures& features);

// The condition of an implementation on the CPU that is compiled for `level`.
Support cpu_with(Device device, VectorLevel level);

// Whether the process may use matrix tiles. The first call asks Linux for them, since signals then
// need larger stacks; Linux refuses where a thread has an alternate signal stack without room for
// the tiles. The answer stays the same.
bool take_tiles();

}  // namespace narrowfloat

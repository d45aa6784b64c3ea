// See vector_level.h.
#include "runtime/vector_level.h"

namespace narrowfloat {
namespace {

#if defined(__x86_64__)

// CPUs with AVX2 and FMA have F16C.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") != 0 &&
         __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vbmi") != 0;
}

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16") != 0; }

#else

bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512_bf16() { return false; }

#endif

}  // namespace

Support cpu_with(Device device, VectorLevel level) {
  Support on_cpu = cpu_only(device);
  if (!on_cpu.ok()) return on_cpu;
  if (level == VectorLevel::kAvx2) {
    return has_avx2() ? Support::yes() : Support::no("needs a CPU with AVX2 and FMA");
  }
  if (level == VectorLevel::kAvx512Bf16 && has_avx512() && !has_avx512_bf16()) {
    return Support::no("needs a CPU with AVX-512 BF16");
  }
  return has_avx512() ? Support::yes()
                      : Support::no("needs a CPU with AVX-512 F, BW, VL, DQ and VBMI");
}

}  // namespace narrowfloat

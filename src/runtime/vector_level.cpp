// See vector_level.h.
#include "runtime/vector_level.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vbmi") != 0 &&
         __builtin_cpu_supports("avx512vnni") != 0;
}

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16") != 0; }

#if defined(__linux__)
constexpr int64_t kTileData = 18;  // XFEATURE_XTILEDATA

// Linux before 5.16 knows no such features.
bool can_give_tiles() {
  constexpr int64_t kGetSupported = 0x1021;  // ARCH_GET_XCOMP_SUPP
  uint64_t features = 0;
  return syscall(SYS_arch_prctl, kGetSupported, &features) == 0 && (features >> kTileData & 1) != 0;
}

bool is_given_tiles() {
  constexpr int64_t kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// AMX TILE, and the features of a bit of that register.
bool has_tiles_of(unsigned int feature) {
  unsigned int eax = 0;
  unsigned int ebx = 0;
  unsigned int ecx = 0;
  unsigned int edx = 0;
  if (!has_avx512_bf16() || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  const unsigned int needed = feature | 1U << 24U;
  if ((edx & needed) != needed) return false;
  static const bool kCanGive = can_give_tiles();
  return kCanGive;
}
bool has_amx_bf16() { return has_tiles_of(1U << 22U); }
bool has_amx_int8() { return has_tiles_of(1U << 25U); }
#else
bool is_given_tiles() { return false; }
bool has_amx_bf16() { return false; }
bool has_amx_int8() { return false; }
#endif

#else

bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512_bf16() { return false; }
bool has_amx_bf16() { return false; }
bool has_amx_int8() { return false; }
bool is_given_tiles() { return false; }

#endif

}  // namespace

Support support_of(VectorLevel level, const VectorFeatures& features) {
  if (!features.avx2) return Support::no("needs a CPU with AVX2 and FMA");
  if (level >= VectorLevel::kAvx512 && !features.avx512) {
    return Support::no("needs a CPU with AVX-512 F, BW, VL, DQ, VBMI and VNNI");
  }
  if (level >= VectorLevel::kAvx512Bf16 && !features.avx512_bf16) {
    return Support::no("needs a CPU with AVX-512 BF16");
  }
  if (level >= VectorLevel::kAmxBf16 && !features.amx_bf16) {
    return Support::no("needs a CPU with AMX BF16, and Linux 5.16 or later");
  }
  if (level >= VectorLevel::kAmxInt8 && !features.amx_int8) {
    return Support::no("needs a CPU with AMX INT8, and Linux 5.16 or later");
  }
  return Support::yes();
}

Support cpu_with(Device device, VectorLevel level) {
  Support on_cpu = cpu_only(device);
  if (!on_cpu.ok()) return on_cpu;
  return support_of(level, {.avx2 = has_avx2(),
                            .avx512 = has_avx512(),
                            .avx512_bf16 = has_avx512_bf16(),
                            .amx_bf16 = level >= VectorLevel::kAmxBf16 && has_amx_bf16(),
                            .amx_int8 = level >= VectorLevel::kAmxInt8 && has_amx_int8()});
}

bool take_tiles() {
  static const bool kAreGiven = has_amx_bf16() && is_given_tiles();
  return kAreGiven;
}

}  // namespace narrowfloat

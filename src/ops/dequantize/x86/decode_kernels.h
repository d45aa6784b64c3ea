// The inner loops of the CPU dequantizers as a table of functions, one for each level of x86 vector
// instructions. docs/architecture.md has the rules for the sources of a level.
//
// The kernels have the bits of src/formats for all codes, scales and global scales, in the
// specified floating-point environment.
#pragma once

#include <cstdint>

namespace narrowfloat {

// The most blocks of one call.
inline constexpr int64_t kMaxDecodedBlocks = 128;

// The element type of the codes and the elements of a block.
enum class DecodedBlock : int { kE2M1Of16 = 0, kE2M1Of32 = 1, kE4M3Of32 = 2, kE4M3Of128 = 3 };
enum class DecodedType : int { kF32 = 0, kBf16 = 1, kF16 = 2 };

struct DecodeKernels {
  // Computes the factors of blocks from their scales; both arrays have kMaxDecodedBlocks entries.
  // E4M3 scales are multiplied by the global scale, or divided by it.
  using E4m3Factors = void (*)(const uint8_t* scales, int64_t blocks, float global_scale,
                               bool divides, float* factors);
  using Ue8m0Factors = void (*)(const uint8_t* scales, int64_t blocks, float* factors);
  // Stores the values of whole blocks. `factors` has kMaxDecodedBlocks entries; those after the
  // first `blocks` are read and do not count.
  using Values = void (*)(const uint8_t* codes, int64_t blocks, const float* factors, void* values);
  // Copies past the caches. What other threads must see needs finish_stream() before they are told.
  using Stream = void (*)(void* to, const void* from, int64_t size_bytes);

  E4m3Factors e4m3_factors;
  Ue8m0Factors ue8m0_factors;
  Values values[4][3];  // Indexed by block and type.
  Stream stream;
  void (*finish_stream)();
};

extern const DecodeKernels kDecodeKernelsAvx2;
extern const DecodeKernels kDecodeKernelsAvx512;

}  // namespace narrowfloat

// The inner loops of the CPU quantizers as a table of functions, one table for each level of x86
// vector instructions.
//
// Each level is a source of its own, compiled with the level's flags. Nothing inline may leave such
// a source: the linker keeps one copy of an inline function, and if that were the one with AVX-512,
// a CPU without it would stop at an illegal instruction. So these sources include this header and
// files of text only, whose templates have internal linkage through their argument, a type
// of an unnamed namespace. tests/python/test_vector_levels.py looks at the objects' symbols.
//
// The kernels have the bits of src/formats for numbers and finite multipliers, with IEEE
// arithmetic. They report what they do not cover; the caller computes that with src/formats.
#pragma once

#include <cstdint>

#include "ops/quantize/x86/row_kernels.h"

namespace narrowfloat {

// The most blocks of one call. Arrays of one number per block have room for all of them.
inline constexpr int64_t kMaxKernelBlocks = 128;

enum class KernelInput : int { kF32 = 0, kBf16 = 1, kF16 = 2 };
enum class KernelBlock : int { k16 = 0, k32 = 1, k128 = 2 };
enum class KernelCodes : int { kE2M1Of16 = 0, kE2M1Of32 = 1, kE4M3Of32 = 2, kE4M3Of128 = 3 };

// NVFP4 with positive normal factors.
struct Nvfp4ScaleRule {
  float encode;        // g
  float encode_sixth;  // RN(g / 6), of `exact`.
  float decode;
  bool is_fast;
};

// MXFP4 and MXFP8.
struct MxScaleRule {
  enum class Rounding : int { kUp, kFloor, kEven };
  Rounding rounding;
  bool is_fast;
  float reciprocal_of_largest;  // RN(1 / 6) or RN(1 / 448)
  int32_t max_exponent;         // That of the largest element.
  int32_t half_unit;            // kEven: half a unit of the element's mantissa, in bits of fp32.
};

// FP8 with blocks of 128 columns, `exact` (formats/fp8_block.h has the rules).
struct Fp8KernelRule {
  enum class Kind : int { kReciprocal, kReciprocalPow2, kAmaxDiv, kPow2Ceil };
  Kind kind;
  float eps;
  float input_max;
};

// NVFP4 with a search between two scales of each block (formats/four_over_six.h has the rule), with
// positive normal factors.
struct FourOverSixKernelRule {
  enum class Difference : int { kStrict, kStrictPerToken, kFast };
  float encode;
  float decode;
  Difference difference;
  bool is_fast;
  bool is_squared;
  float row_amax;    // kStrictPerToken
  float code_range;  // kStrictPerToken
};

struct BlockKernels {
  // Stores the largest magnitude of each block, as integers compare them: NaN is larger than
  // infinity. Returns whether all elements are finite.
  using Maxima = bool (*)(const void* x, int64_t blocks, float* maxima);
  // Store the scale and the multiplier of each block with a finite maximum. Those that return
  // false, with arbitrary results, do not cover one of the blocks.
  using Nvfp4Scales = void (*)(const float* maxima, int64_t blocks, const Nvfp4ScaleRule& rule,
                               uint8_t* scales, float* multipliers);
  using MxScales = bool (*)(const float* maxima, int64_t blocks, const MxScaleRule& rule,
                            uint8_t* scales, float* multipliers);
  using Fp8Scales = bool (*)(const float* maxima, int64_t blocks, const Fp8KernelRule& rule,
                             float* scales, float* multipliers);
  // Stores the scales and multipliers that four_over_six.h chooses for blocks of finite elements.
  // Those of blocks of zeros are 0. Returns false, with arbitrary results, if the formulas do not
  // cover one of the blocks.
  using FourOverSixScales = bool (*)(const void* x, int64_t blocks, const float* maxima,
                                     const FourOverSixKernelRule& rule, uint8_t* scales,
                                     float* multipliers);
  // Stores the packed codes of RN(x * multiplier). Those of blocks with an element that is infinite
  // or NaN, or with such a multiplier, are arbitrary.
  using Codes = void (*)(const void* x, int64_t blocks, const float* multipliers, uint8_t* codes);

  // Copies past the caches. What other threads must see needs finish_stream() before they are told.
  using Stream = void (*)(void* to, const void* from, int64_t size_bytes);

  Maxima maxima[3][3];  // Indexed by input and block.
  Codes codes[3][4];    // Indexed by input and codes.
  Nvfp4Scales nvfp4_scales;
  MxScales mx_scales;
  Fp8Scales fp8_scales;
  FourOverSixScales four_over_six_scales[3];  // Indexed by input.
  Stream stream;
  void (*finish_stream)();

  RowKernels rows;
};

extern const BlockKernels kBlockKernelsAvx2;
extern const BlockKernels kBlockKernelsAvx512;

}  // namespace narrowfloat

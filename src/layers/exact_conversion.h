// Conversions between formats that keep values: by moving powers of two between scales and codes.
//
//   MXFP4 -> NVFP4   One global scale 2^(top - 8) and E4M3 scales 2^(e - top + 8). E4M3 has the
//                    powers 2^-9 to 2^8, so exponents e of [top - 17, top] are exact. A block
//                    outside of that may still be, if its codes can be doubled or halved.
//   NVFP4 -> MXFP4   Where the scale of the tensor, and those of each block, are powers of two and
//                    both halves of 32 columns have the same.
//   MXFP4 -> MXFP8   Always: E4M3 has the values of E2M1, and the scales stay.
//   FP8 -> MXFP8     Where the scales of the 128x128 blocks are powers of two.
//
// Blocks are counted in rows: 32 columns of one row that share a scale. Rows are dense and linear.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "checkpoint/conventions/convention.h"

namespace narrowfloat {

// The exponents of MXFP4 blocks that an NVFP4 tensor (or several of one global scale) must hold.
class PowerWindow {
 public:
  // Adds blocks of 16 code bytes and one scale byte each; without `codes` blocks of zeros count as
  // others do. Returns the first block whose scale is NaN, or -1.
  int64_t add(std::span<const std::byte> codes, std::span<const std::byte> scales);
  // Adds the blocks of another window.
  void add(const PowerWindow& other);

  // Whether all exponents fit, so that the codes stay as they are.
  [[nodiscard]] bool fits() const { return highest_ - lowest_ <= kSpan; }
  // The best exponent of the largest block scale that the global scale allows, 2^8.
  [[nodiscard]] int top() const;
  // Whether all blocks keep their values with this top, codes doubled or halved where that helps;
  // others are rounded.
  [[nodiscard]] bool fits_under(int top) const;

  static constexpr int kTopScaleExponent = 8;  // E4M3's largest power of two is 2^8,
  static constexpr int kSpan = 17;             // its smallest 2^-9.
  static constexpr int kMinTop = -118;         // 2^(top - 8) and its reciprocal are normal F32.

 private:
  static constexpr int kNoTop = -1000;

  bool is_empty_ = true;
  int lowest_ = 0;  // Exponents of blocks with nonzero codes.
  int highest_ = 0;
  int least_top_ = kNoTop;     // The least top, and the largest exponent of the smallest scale,
  int most_bottom_ = -kNoTop;  // with which all blocks keep their values.
};

// Converts blocks from MXFP4 to NVFP4, whose scales are two bytes for each of them.
void mxfp4_to_nvfp4(std::span<const std::byte> codes, std::span<const std::byte> scales, int top,
                    uint8_t zero_block_scale, std::span<std::byte> nvfp4_codes,
                    std::span<std::byte> nvfp4_scales);

// The exponent of a power of two of fp32 that UE8M0 has, [-127, 127]; empty for other values.
std::optional<int> exponent_of_power(float value);

// Whether a part of an NVFP4 weight, whose decode scale of the tensor is 2^exponent, fits MXFP4.
bool fits_mxfp4(std::span<const std::byte> nvfp4_scales, int exponent);
// Converts the scales of such a part; a block of zeros gets byte 0.
void nvfp4_to_mxfp4_scales(std::span<const std::byte> codes,
                           std::span<const std::byte> nvfp4_scales, int exponent,
                           std::span<std::byte> scales);

// Two FP4 codes a byte to one FP8 code a byte.
void mxfp4_to_mxfp8_codes(std::span<const std::byte> codes, std::span<std::byte> fp8_codes);

// Scales of 128x128 blocks, all of which are powers of two, for each row and 32 columns.
// `block_scales` has ceil(rows / 128) rows of ceil(cols / 128).
void spread_block_scales(std::span<const std::byte> block_scales, int64_t rows, int64_t cols,
                         std::span<std::byte> scales);

}  // namespace narrowfloat

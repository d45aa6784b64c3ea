// See exact_conversion.h.
#include "layers/exact_conversion.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/assert.h"
#include "base/int_math.h"
#include "formats/minifloat.h"
#include "formats/ue8m0.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

constexpr int64_t kBlockBytes = 16;  // Codes of 32 columns.
constexpr int64_t kGrain = 4096;
constexpr int kMaxScaleExponent = PowerWindow::kTopScaleExponent;
constexpr int kMinScaleExponent = kMaxScaleExponent - PowerWindow::kSpan;
static_assert(E4M3::decode(E4M3::encode(0x1p8F)) == 0x1p8F && E4M3::kMaxFinite < 0x1p9F);
static_assert(E4M3::kDenormalStep == 0x1p-9F);
constexpr int kUnlimited = 500;  // Beyond all differences of exponents.

// How far the codes of a magnitude can be halved, or doubled, without a loss.
//   magnitude  0  .5   1 1.5   2   3   4   6
constexpr std::array<int, 8> kHalvings = {kUnlimited, 0, 1, 0, 2, 1, 3, 2};
constexpr std::array<int, 8> kDoublings = {kUnlimited, 3, 2, 2, 1, 1, 0, 0};

constexpr bool limits_are_right() {
  for (uint8_t code = 1; code < 8; ++code) {
    const auto is_exact = [&](float factor) {
      const float value = E2M1::decode(code) * factor;
      return E2M1::decode(E2M1::encode(value)) == value;
    };
    float factor = 1.0F;
    for (int i = 0; i <= kHalvings[code]; ++i, factor *= 0.5F) {
      if (!is_exact(factor)) return false;
    }
    if (is_exact(factor)) return false;
    factor = 1.0F;
    for (int i = 0; i <= kDoublings[code]; ++i, factor *= 2.0F) {
      if (!is_exact(factor)) return false;
    }
    if (is_exact(factor)) return false;
  }
  return true;
}
static_assert(limits_are_right());

// Bit m is set where a code of magnitude m occurs, of those that are not zero.
uint32_t magnitudes(std::span<const std::byte> codes) {
  uint32_t set = 0;
  for (const std::byte byte : codes) {
    const auto pair = static_cast<unsigned>(byte);
    set |= 1U << (pair & 7U) | 1U << (pair >> 4 & 7U);
  }
  return set & ~1U;
}

// The smallest entry of `limits` for a set of magnitudes.
int limit_of(uint32_t set, const std::array<int, 8>& limits) {
  int limit = kUnlimited;
  for (; set != 0; set &= set - 1) {
    limit = std::min(limit, limits[static_cast<size_t>(std::countr_zero(set))]);
  }
  return limit;
}

std::span<const std::byte> block_of(std::span<const std::byte> codes, int64_t block) {
  return codes.subspan(static_cast<size_t>(block * kBlockBytes), kBlockBytes);
}

// Codes of 2^shift times the values, rounded to nearest even.
void shift_codes(std::span<const std::byte> codes, int shift, std::span<std::byte> shifted) {
  const float factor = std::ldexp(1.0F, std::clamp(shift, -8, 8));
  const auto one = [&](unsigned code) {
    return static_cast<unsigned>(E2M1::encode(E2M1::decode(static_cast<uint8_t>(code)) * factor));
  };
  for (size_t i = 0; i < codes.size(); ++i) {
    const auto pair = static_cast<unsigned>(codes[i]);
    shifted[i] = static_cast<std::byte>(one(pair & 0xFU) | one(pair >> 4) << 4);
  }
}

bool is_zero(std::span<const std::byte> block) {
  constexpr uint64_t kMagnitudes = 0x7777777777777777U;
  std::array<uint64_t, 2> words{};
  std::memcpy(words.data(), block.data(), sizeof(words));
  return ((words[0] | words[1]) & kMagnitudes) == 0;
}

// The E4M3 code of 2^exponent.
std::byte power_code(int exponent) {
  static const auto kCodes = [] {
    std::array<std::byte, kMaxScaleExponent - kMinScaleExponent + 1> codes{};
    for (size_t i = 0; i < codes.size(); ++i) {
      const float power = std::ldexp(1.0F, kMinScaleExponent + static_cast<int>(i));
      codes[i] = static_cast<std::byte>(E4M3::encode(power));
    }
    return codes;
  }();
  return kCodes.at(static_cast<size_t>(exponent - kMinScaleExponent));
}

void convert_block(std::span<const std::byte> codes, int exponent, int top, uint8_t zero_scale,
                   std::span<std::byte> out_codes, std::span<std::byte> out_scales) {
  if (is_zero(codes)) {
    std::copy(codes.begin(), codes.end(), out_codes.begin());
    std::fill(out_scales.begin(), out_scales.end(), static_cast<std::byte>(zero_scale));
    return;
  }
  const int stored = std::clamp(exponent, top - PowerWindow::kSpan, top);
  std::fill(out_scales.begin(), out_scales.end(), power_code(stored - top + kMaxScaleExponent));
  if (stored == exponent) {
    std::copy(codes.begin(), codes.end(), out_codes.begin());
  } else {
    shift_codes(codes, exponent - stored, out_codes);
  }
}

}  // namespace

int64_t PowerWindow::add(std::span<const std::byte> codes, std::span<const std::byte> scales) {
  for (size_t block = 0; block < scales.size(); ++block) {
    const auto scale = static_cast<uint8_t>(scales[block]);
    if (scale == UE8M0::kNanCode) return static_cast<int64_t>(block);
    const int exponent = scale - UE8M0::kBias;
    PowerWindow one;
    one.is_empty_ = false;
    one.lowest_ = one.highest_ = one.least_top_ = one.most_bottom_ = exponent;
    if (!codes.empty()) {
      const uint32_t set = magnitudes(block_of(codes, static_cast<int64_t>(block)));
      if (set == 0) continue;
      // A block under a smaller scale has larger codes.
      one.least_top_ -= limit_of(set, kDoublings);
      one.most_bottom_ += limit_of(set, kHalvings);
    }
    add(one);
  }
  return -1;
}

void PowerWindow::add(const PowerWindow& other) {
  if (other.is_empty_) return;
  lowest_ = is_empty_ ? other.lowest_ : std::min(lowest_, other.lowest_);
  highest_ = is_empty_ ? other.highest_ : std::max(highest_, other.highest_);
  least_top_ = std::max(least_top_, other.least_top_);
  most_bottom_ = std::min(most_bottom_, other.most_bottom_);
  is_empty_ = false;
}

int PowerWindow::top() const {
  if (is_empty_) return kMaxScaleExponent;  // All is zero; a global scale of 1.
  if (fits()) return std::max(highest_, kMinTop);
  const int wanted = std::min(highest_, most_bottom_ + kSpan);
  return std::max({wanted, least_top_, kMinTop});
}

bool PowerWindow::fits_under(int top) const {
  if (is_empty_) return true;
  const bool stays = highest_ <= top && lowest_ >= top - kSpan;
  return stays || (least_top_ <= top && most_bottom_ >= top - kSpan);
}

void mxfp4_to_nvfp4(std::span<const std::byte> codes, std::span<const std::byte> scales, int top,
                    uint8_t zero_block_scale, std::span<std::byte> nvfp4_codes,
                    std::span<std::byte> nvfp4_scales) {
  parallel_for(static_cast<int64_t>(scales.size()), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const auto scale = static_cast<uint8_t>(scales[static_cast<size_t>(block)]);
      convert_block(block_of(codes, block), scale - UE8M0::kBias, top, zero_block_scale,
                    nvfp4_codes.subspan(static_cast<size_t>(block * kBlockBytes), kBlockBytes),
                    nvfp4_scales.subspan(static_cast<size_t>(block * 2), 2));
    }
  });
}

std::optional<int> exponent_of_power(float value) {
  int exponent = 0;
  if (!(value > 0) || !std::isfinite(value) || std::frexp(value, &exponent) != 0.5F) {
    return std::nullopt;
  }
  --exponent;
  if (exponent < -UE8M0::kBias || exponent > UE8M0::kBias) return std::nullopt;
  return exponent;
}

bool fits_mxfp4(std::span<const std::byte> nvfp4_scales, int exponent) {
  for (size_t i = 0; i < nvfp4_scales.size(); i += 2) {
    if (nvfp4_scales[i] != nvfp4_scales[i + 1]) return false;
    const auto power = exponent_of_power(E4M3::decode(static_cast<uint8_t>(nvfp4_scales[i])));
    if (!power || std::abs(*power + exponent) > UE8M0::kBias) return false;
  }
  return true;
}

void nvfp4_to_mxfp4_scales(std::span<const std::byte> codes,
                           std::span<const std::byte> nvfp4_scales, int exponent,
                           std::span<std::byte> scales) {
  parallel_for(static_cast<int64_t>(scales.size()), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const auto stored = static_cast<uint8_t>(nvfp4_scales[static_cast<size_t>(block * 2)]);
      const int power = exponent_of_power(E4M3::decode(stored)).value_or(0) + exponent;
      scales[static_cast<size_t>(block)] =
          static_cast<std::byte>(is_zero(block_of(codes, block)) ? 0 : power + UE8M0::kBias);
    }
  });
}

void mxfp4_to_mxfp8_codes(std::span<const std::byte> codes, std::span<std::byte> fp8_codes) {
  static const std::array<std::byte, 16> kCodes = [] {
    std::array<std::byte, 16> table{};
    for (size_t code = 0; code < table.size(); ++code) {
      const float value = E2M1::decode(static_cast<uint8_t>(code));
      table[code] = static_cast<std::byte>(E4M3::encode(value));
    }
    return table;
  }();
  parallel_for(static_cast<int64_t>(codes.size()), kGrain * kBlockBytes,
               [&](int64_t begin, int64_t end) {
                 for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
                   const auto pair = static_cast<size_t>(codes[i]);
                   fp8_codes[2 * i] = kCodes[pair & 0xF];
                   fp8_codes[2 * i + 1] = kCodes[pair >> 4];
                 }
               });
}

void spread_block_scales(std::span<const std::byte> block_scales, int64_t rows, int64_t cols,
                         std::span<std::byte> scales) {
  constexpr int64_t kTile = 128;
  constexpr int64_t kBlockCols = 32;
  const int64_t tile_cols = ceil_div(cols, kTile);
  const int64_t blocks = cols / kBlockCols;
  std::vector<std::byte> one_row(static_cast<size_t>(blocks));
  for (int64_t row = 0; row < rows; ++row) {
    if (row % kTile == 0) {
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t tile = row / kTile * tile_cols + block * kBlockCols / kTile;
        float scale = 0;
        std::memcpy(&scale, &block_scales[static_cast<size_t>(tile) * sizeof(scale)],
                    sizeof(scale));
        const std::optional<int> exponent = exponent_of_power(scale);
        NF_ASSERT(exponent.has_value());
        one_row[static_cast<size_t>(block)] = static_cast<std::byte>(*exponent + UE8M0::kBias);
      }
    }
    std::copy(one_row.begin(), one_row.end(), scales.begin() + row * blocks);
  }
}

}  // namespace narrowfloat

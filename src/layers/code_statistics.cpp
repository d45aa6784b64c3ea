// Blocks are counted by rows of blocks in parallel; sums of integers do not depend on the split.
#include "layers/code_statistics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <mutex>

#include "base/int_math.h"
#include "formats/minifloat.h"
#include "formats/ue8m0.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

constexpr int64_t kGrainElements = int64_t{1} << 16;
constexpr uint8_t kFp8Nan = 0x7F;
constexpr uint8_t kFp8Max = 0x7E;
constexpr uint8_t kFp4Max = 0x7;
// The smallest magnitude codes that are at least a third of the maximum: 2 of 6, and 160 of 448.
constexpr uint8_t kFp4Third = 0x4;
constexpr uint8_t kFp8Third = 0x72;
static_assert(E2M1::decode(kFp4Third) == 2.0F && E4M3::decode(kFp8Third) == 160.0F);

struct CodeCounts {
  std::array<int64_t, 256> bytes{};  // Index: stored byte, two codes or one.
};

int exponent_of(double scale) { return std::ilogb(scale); }

int64_t count_different(std::span<const std::byte> a, std::span<const std::byte> b,
                        size_t element_bytes) {
  int64_t count = 0;
  for (size_t at = 0; at < a.size(); at += element_bytes) {
    count += std::memcmp(&a[at], &b[at], element_bytes) != 0 ? 1 : 0;
  }
  return count;
}

int64_t count_different_nibbles(std::span<const std::byte> a, std::span<const std::byte> b) {
  int64_t count = 0;
  for (size_t at = 0; at < a.size(); ++at) {
    const std::byte difference = a[at] ^ b[at];
    count += (difference & std::byte{0x0F}) != std::byte{0} ? 1 : 0;
    count += (difference & std::byte{0xF0}) != std::byte{0} ? 1 : 0;
  }
  return count;
}

}  // namespace

StatisticsCounter::StatisticsCounter(const ConventionSpec& spec, int64_t rows, int64_t cols)
    : format_(format_info(spec.info.format)),
      rows_(rows),
      cols_(cols),
      is_col_block_used_(static_cast<size_t>(ceil_div(cols, format_.block_cols))) {}

void StatisticsCounter::add(QuantizedWeight& coded) {
  const std::vector<uint8_t> block_maxima = count_codes(coded);
  count_scales(coded, block_maxima);
  rows_seen_ += coded.rows();
}

std::vector<uint8_t> StatisticsCounter::count_codes(QuantizedWeight& coded) {
  const bool is_packed = format_.element_bits == 4;
  const std::span<const std::byte> values = coded.values();
  const int64_t rows = coded.rows();
  const int64_t row_bytes = is_packed ? cols_ / 2 : cols_;
  const int64_t block_bytes = is_packed ? format_.block_cols / 2 : format_.block_cols;
  const auto col_blocks = static_cast<int64_t>(is_col_block_used_.size());
  const int64_t row_blocks = ceil_div(rows, format_.block_rows);
  std::vector<uint8_t> maxima(static_cast<size_t>(row_blocks * col_blocks));
  std::vector<uint8_t> is_row_used(static_cast<size_t>(rows));
  CodeCounts total;
  std::mutex mutex;
  const int64_t grain = row_grain(kGrainElements, cols_ * format_.block_rows);
  parallel_for(row_blocks, grain, [&](int64_t begin, int64_t end) {
    CodeCounts counts;
    for (int64_t row = begin * format_.block_rows; row < std::min(end * format_.block_rows, rows);
         ++row) {
      const std::byte* const row_values = values.data() + row * row_bytes;
      uint8_t* const row_maxima =
          &maxima[static_cast<size_t>(row / format_.block_rows) * static_cast<size_t>(col_blocks)];
      uint8_t row_maximum = 0;
      for (int64_t block = 0; block < col_blocks; ++block) {
        uint8_t maximum = 0;
        const int64_t last = std::min((block + 1) * block_bytes, row_bytes);
        for (int64_t at = block * block_bytes; at < last; ++at) {
          const auto byte = static_cast<uint8_t>(row_values[at]);
          ++counts.bytes[byte];
          if (is_packed) {
            maximum = std::max({maximum, static_cast<uint8_t>(byte & kFp4Max),
                                static_cast<uint8_t>(byte >> 4 & kFp4Max)});
          } else {
            maximum = std::max(maximum, static_cast<uint8_t>(byte & kFp8Nan));
          }
        }
        row_maxima[block] = std::max(row_maxima[block], maximum);
        row_maximum = std::max(row_maximum, maximum);
      }
      is_row_used[static_cast<size_t>(row)] = row_maximum;
    }
    const std::lock_guard lock(mutex);
    for (size_t i = 0; i < counts.bytes.size(); ++i) total.bytes[i] += counts.bytes[i];
  });
  for (size_t byte = 0; byte < total.bytes.size(); ++byte) {
    const int64_t count = total.bytes[byte];
    if (is_packed) {
      statistics_.code_counts[byte & 0xF] += count;
      statistics_.code_counts[byte >> 4] += count;
      statistics_.codes_at_maximum += (byte & kFp4Max) == kFp4Max ? count : 0;
      statistics_.codes_at_maximum += (byte >> 4 & kFp4Max) == kFp4Max ? count : 0;
    } else {
      statistics_.code_counts[byte >> 3 & 0xF] += count;
      statistics_.codes_at_maximum += (byte & kFp8Nan) == kFp8Max ? count : 0;
      statistics_.nan_codes += (byte & kFp8Nan) == kFp8Nan ? count : 0;
    }
  }
  statistics_.codes += rows * cols_;
  for (int64_t row = 0; row < rows; ++row) {
    if (is_row_used[static_cast<size_t>(row)] != 0) last_nonzero_row_ = rows_seen_ + row;
  }
  for (size_t i = 0; i < maxima.size(); ++i) {
    if (maxima[i] != 0) is_col_block_used_[i % is_col_block_used_.size()] = 1;
  }
  return maxima;
}

void StatisticsCounter::count_scales(QuantizedWeight& coded,
                                     const std::vector<uint8_t>& block_maxima) {
  const uint8_t third = format_.element_bits == 4 ? kFp4Third : kFp8Third;
  const std::span<const std::byte> scales = coded.scales();
  const auto scale_bytes = static_cast<size_t>(bytes(format_.scale_type));
  for (size_t block = 0; block < block_maxima.size(); ++block) {
    const uint8_t maximum = block_maxima[block];
    if (maximum == 0) {
      ++statistics_.zero_blocks;
      continue;
    }
    statistics_.low_blocks += maximum < third ? 1 : 0;
    if (format_.scale_type == ScaleType::kUE8M0) continue;  // It has no zero.
    bool is_zero = true;
    for (size_t i = 0; i < scale_bytes; ++i) {
      // The last byte has the sign.
      const std::byte sign = i + 1 == scale_bytes ? std::byte{0x80} : std::byte{0};
      is_zero = is_zero && (scales[block * scale_bytes + i] & ~sign) == std::byte{0};
    }
    statistics_.vanished_blocks += is_zero ? 1 : 0;
  }
  count_block_scales(format_.scale_type, scales, statistics_);
}

CodeStatistics StatisticsCounter::result() const {
  CodeStatistics result = statistics_;
  if (last_nonzero_row_ < 0) return result;
  result.zero_rows = rows_ - 1 - last_nonzero_row_;
  const auto last = std::find(is_col_block_used_.rbegin(), is_col_block_used_.rend(), 1);
  const auto zero_blocks = static_cast<int64_t>(last - is_col_block_used_.rbegin());
  const auto used_blocks = static_cast<int64_t>(is_col_block_used_.size()) - zero_blocks;
  result.zero_cols = std::max<int64_t>(0, cols_ - used_blocks * format_.block_cols);
  return result;
}

namespace {

void count_scale(double scale, CodeStatistics& statistics) {
  if (!std::isfinite(scale)) {
    ++statistics.nonfinite_scales;
  } else if (scale == 0) {
    ++statistics.zero_scales;
  } else if (scale < 0) {
    ++statistics.negative_scales;
  } else {
    const bool is_first = statistics.largest_scale == 0;
    statistics.smallest_scale = is_first ? scale : std::min(statistics.smallest_scale, scale);
    statistics.largest_scale = std::max(statistics.largest_scale, scale);
    ++statistics.scale_exponents[exponent_of(scale)];
    if (std::ldexp(1.0, exponent_of(scale)) != scale) ++statistics.uneven_scales;
  }
}

// `count` scales of one value.
void count_scales_of_byte(ScaleType type, uint8_t byte, int64_t count, CodeStatistics& statistics) {
  if (count == 0) return;
  const bool is_e4m3 = type == ScaleType::kE4M3;
  CodeStatistics one;
  count_scale(static_cast<double>(is_e4m3 ? E4M3::decode(byte) : UE8M0::decode(byte)), one);
  statistics.nonfinite_scales += count * one.nonfinite_scales;
  statistics.zero_scales += count * one.zero_scales;
  statistics.negative_scales += count * one.negative_scales;
  statistics.uneven_scales += count * one.uneven_scales;
  for (const auto& [exponent, number] : one.scale_exponents) {
    statistics.scale_exponents[exponent] += count * number;
  }
  if (one.largest_scale > 0) {
    const bool is_first = statistics.largest_scale == 0;
    statistics.smallest_scale =
        is_first ? one.largest_scale : std::min(statistics.smallest_scale, one.largest_scale);
    statistics.largest_scale = std::max(statistics.largest_scale, one.largest_scale);
  }
  if (is_e4m3) {
    statistics.denormal_scales += byte > 0 && byte < 0x08 ? count : 0;
    statistics.saturated_scales += byte == kFp8Max ? count : 0;
  } else {
    statistics.denormal_scales += byte == 0 ? count : 0;
    statistics.saturated_scales += byte == UE8M0::kMaxCode ? count : 0;
  }
}

}  // namespace

void count_block_scales(ScaleType type, std::span<const std::byte> scales,
                        CodeStatistics& statistics) {
  if (type == ScaleType::kF32) {
    for (size_t at = 0; at < scales.size(); at += sizeof(float)) {
      float scale = 0;
      std::memcpy(&scale, &scales[at], sizeof(scale));
      count_scale(static_cast<double>(scale), statistics);
      if (std::fpclassify(scale) == FP_SUBNORMAL) ++statistics.denormal_scales;
    }
    statistics.blocks += static_cast<int64_t>(scales.size() / sizeof(float));
    return;
  }
  std::array<int64_t, 256> counts{};
  for (const std::byte scale : scales) ++counts[static_cast<uint8_t>(scale)];
  for (size_t byte = 0; byte < counts.size(); ++byte) {
    count_scales_of_byte(type, static_cast<uint8_t>(byte), counts[byte], statistics);
  }
  statistics.blocks += static_cast<int64_t>(scales.size());
}

int64_t count_different_codes(const FormatInfo& format, std::span<const std::byte> a,
                              std::span<const std::byte> b) {
  return format.element_bits == 4 ? count_different_nibbles(a, b) : count_different(a, b, 1);
}

int64_t count_different_scales(const FormatInfo& format, std::span<const std::byte> a,
                               std::span<const std::byte> b) {
  return count_different(a, b, static_cast<size_t>(bytes(format.scale_type)));
}

}  // namespace narrowfloat

// Rows are independent. A tile of them is worked on together, one in each lane, so that an element
// of the factor is read once for all.
#include "layers/compensated_rounding.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "layers/block_scales.h"
#include "narrowfloat/runtime.h"
#include "runtime/parallel.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

constexpr int64_t kTileRows = 16;
using Lanes = std::array<double, kTileRows>;

template <class BlockScales>
class TileRounder {
 public:
  TileRounder(const TensorView& input, const BlockScales& block_scales, const HessianFactor& factor,
              QuantizedWeight& output)
      : input_(input),
        scales_(block_scales),
        factor_(factor),
        values_(output.values()),
        stored_scales_(output.scales()),
        cols_(output.cols()),
        rows_(static_cast<size_t>(kTileRows * cols_)),
        errors_(static_cast<size_t>(cols_)) {}

  // Rounds rows [first, first + count), at most kTileRows.
  void run(int64_t first, int64_t count) {
    first_ = first;
    count_ = count;
    for (int64_t lane = 0; lane < count; ++lane) {
      const std::span<float> row = row_of(lane);
      widen(input_.dtype, element_pointer(input_.data, input_.dtype, (first + lane) * cols_), cols_,
            row.data());
      is_finite_[static_cast<size_t>(lane)] =
          std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); });
    }
    for (int64_t step = 0; step < cols_; ++step) round_column(step);
  }

 private:
  std::span<float> row_of(int64_t lane) {
    return std::span(rows_).subspan(static_cast<size_t>(lane * cols_), static_cast<size_t>(cols_));
  }

  void round_column(int64_t step) {
    const int64_t col = factor_.order()[static_cast<size_t>(step)];
    const std::span<const double> factors = factor_.row(step);
    Lanes sums{};
    for (size_t i = 0; i < static_cast<size_t>(step); ++i) {
      for (size_t lane = 0; lane < sums.size(); ++lane) {
        sums[lane] += errors_[i][lane] * factors[i];
      }
    }
    Lanes& errors = errors_[static_cast<size_t>(step)];
    errors.fill(0);
    for (int64_t lane = 0; lane < count_; ++lane) {
      if (!is_finite_[static_cast<size_t>(lane)]) continue;
      const auto at = static_cast<size_t>(lane);
      errors[at] = round_element(lane, col, sums[at] / factors.back());
    }
  }

  // Returns the error of the element after rounding it with `change` added.
  double round_element(int64_t lane, int64_t col, double change) {
    const float x = row_of(lane)[static_cast<size_t>(col)];
    const int64_t row = first_ + lane;
    const int64_t block = (row * cols_ + col) / BlockScales::kCols;
    const int scale = static_cast<int>(stored_scales_[static_cast<size_t>(block)]);
    constexpr auto kLargest = static_cast<double>(std::numeric_limits<float>::max());
    const double changed = std::clamp(static_cast<double>(x) + change, -kLargest, kLargest);
    const uint8_t code =
        BlockScales::encode(static_cast<float>(changed), scales_.multiplier(scale));
    store(row * cols_ + col, code);
    // A product of a code and a scale rounds as in a reader.
    const double error =
        static_cast<double>(x) -
        static_cast<double>(BlockScales::Element::decode(code) * scales_.decode_scale(scale));
    // Nothing makes up for a product beyond the range of F32.
    return std::isfinite(error) ? error : 0;
  }

  void store(int64_t element, uint8_t code) {
    if constexpr (BlockScales::Element::kBits == 4) {
      std::byte& both = values_[static_cast<size_t>(element / 2)];
      const bool is_high = element % 2 != 0;
      const auto kept = both & (is_high ? std::byte{0x0F} : std::byte{0xF0});
      both = kept | static_cast<std::byte>(is_high ? code << 4 : code);
    } else {
      values_[static_cast<size_t>(element)] = static_cast<std::byte>(code);
    }
  }

  const TensorView& input_;
  const BlockScales& scales_;
  const HessianFactor& factor_;
  std::span<std::byte> values_;
  std::span<std::byte> stored_scales_;
  int64_t cols_;
  std::vector<float> rows_;
  std::vector<Lanes> errors_;  // One entry for each column that is rounded, in their order.
  std::array<bool, kTileRows> is_finite_{};
  int64_t first_ = 0;
  int64_t count_ = 0;
};

}  // namespace

void round_compensated(const TensorView& input, MathMode math, float encode_scale,
                       const HessianFactor& factor, QuantizedWeight& output) {
  with_block_scales(output, math, encode_scale, [&](const auto& block_scales) {
    const int64_t tiles = (output.rows() + kTileRows - 1) / kTileRows;
    parallel_for(tiles, 1, [&](int64_t begin, int64_t end) {
      TileRounder rounder(input, block_scales, factor, output);
      for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t first = tile * kTileRows;
        rounder.run(first, std::min(kTileRows, output.rows() - first));
      }
    });
  });
}

uint64_t compensated_rounding_bytes(int64_t cols) {
  const uint64_t of_thread =
      static_cast<uint64_t>(cols) * (kTileRows * sizeof(float) + sizeof(Lanes));
  return static_cast<uint64_t>(num_threads()) * of_thread;
}

}  // namespace narrowfloat

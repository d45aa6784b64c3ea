// Few scales need trying. Let m be the largest magnitude of a block and M the largest value of the
// element type.
//
//   - A scale s with M * s < m clips m, with a squared error of at least (m - M * s)^2, times the
//     weight of m. Where that is no less than the best error so far, no smaller scale is better
//     either.
//   - The values of scale 2s up to M * s are among those of scale s, so that 2s is never better
//     than s where M * s >= m. The scales at and above twice the smallest one that does not clip
//     are left out. (E4M3's denormals have no half in E4M3, so that the smallest normal scales,
//     their doubles, are tried too.)
//
// Ties keep the scale of the maximum, then the smaller change of it. With the kernels of a vector
// level neighbouring scales are tried together, also those that turn out to need no trial.
#include "layers/scale_search.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "layers/block_scales.h"
#include "layers/x86/scale_search_kernels.h"
#include "runtime/parallel.h"
#include "runtime/vector_level.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

constexpr int64_t kSearchGrain = 256;  // Blocks.

// The factors of a stored byte, for elements and for codes. Entries after the last scale are not
// used.
template <class BlockScales>
struct ScaleTable {
  static constexpr size_t kSize = BlockScales::kLast + kSearchLanes;
  std::array<float, kSize> multipliers{};
  std::array<float, kSize> factors{};

  explicit ScaleTable(const BlockScales& scales) {
    for (int stored = BlockScales::kFirst; stored <= BlockScales::kLast; ++stored) {
      multipliers[static_cast<size_t>(stored)] = scales.multiplier(stored);
      factors[static_cast<size_t>(stored)] = scales.decode_scale(stored);
    }
  }
};

template <class BlockScales>
class BlockSearch {
 public:
  // errors_of: null for the portable loop.
  BlockSearch(const ScaleTable<BlockScales>& table, ScaleSearchKernels::Errors errors_of)
      : table_(table), errors_of_(errors_of) {}

  // The best scale for `x`. `weights`: of the elements' squared errors. `start`: the scale of the
  // maximum.
  uint8_t run(const float* x, const float* weights, uint8_t start) {
    block_ = {x, weights, BlockScales::kCols};
    float amax = 0;
    double weight = 0;  // The maximum has it.
    for (int64_t i = 0; i < BlockScales::kCols; ++i) {
      if (!std::isfinite(x[i])) return start;
      if (std::abs(x[i]) > amax) weight = static_cast<double>(weights[i]);
      amax = std::max(amax, std::abs(x[i]));
    }
    if (amax == 0 || start < BlockScales::kFirst || start > BlockScales::kLast) return start;
    known_ = 0;
    best_error_ = error_below(start);
    best_ = start;
    for (int stored = start - 1; stored >= BlockScales::kFirst; --stored) {
      const double clipped = static_cast<double>(amax) - largest(stored);
      if (clipped > 0 && weight * clipped * clipped >= best_error_) break;
      try_scale(stored, error_below(stored));
    }
    // Above a scale that does not clip, up to its double.
    double limit = 0;
    for (int stored = start; stored <= BlockScales::kLast; ++stored) {
      const bool clips = largest(stored) < static_cast<double>(amax);
      if (limit == 0 && !clips) limit = 2 * largest(stored);
      const bool is_double = limit > 0 && largest(stored) >= limit;
      if (is_double && BlockScales::has_half(stored)) break;
      if (stored > start) try_scale(stored, error_from(stored, stored));
    }
    return static_cast<uint8_t>(best_);
  }

 private:
  [[nodiscard]] double largest(int stored) const {
    return static_cast<double>(BlockScales::Element::kMaxFinite) *
           static_cast<double>(table_.factors[static_cast<size_t>(stored)]);
  }

  void try_scale(int stored, double error) {
    if (error >= best_error_) return;
    best_error_ = error;
    best_ = stored;
  }

  // The error of a scale, after which smaller ones are asked for.
  double error_below(int stored) {
    constexpr int kOthers = static_cast<int>(kSearchLanes) - 1;
    return error_from(std::max(BlockScales::kFirst, stored - kOthers), stored);
  }

  // The error of a scale; with kernels those from `first` on are computed where it is not known.
  double error_from(int first, int stored) {
    if (errors_of_ == nullptr) return portable_error(stored);
    if (stored < first_known_ || stored >= first_known_ + known_) {
      const auto at = static_cast<size_t>(first);
      errors_of_(block_, &table_.multipliers[at], &table_.factors[at], errors_.data());
      first_known_ = first;
      known_ = static_cast<int>(kSearchLanes);
    }
    return errors_[static_cast<size_t>(stored - first_known_)];
  }

  [[nodiscard]] double portable_error(int stored) const {
    const float multiplier = table_.multipliers[static_cast<size_t>(stored)];
    const float factor = table_.factors[static_cast<size_t>(stored)];
    double sum = 0;
    for (int64_t i = 0; i < BlockScales::kCols; ++i) {
      const uint8_t code = BlockScales::encode(block_.x[i], multiplier);
      // A product of a code and a scale rounds as in a reader.
      const double error = static_cast<double>(block_.x[i]) -
                           static_cast<double>(BlockScales::Element::decode(code) * factor);
      sum += static_cast<double>(block_.weights[i]) * error * error;
    }
    return sum;
  }

  const ScaleTable<BlockScales>& table_;
  ScaleSearchKernels::Errors errors_of_;
  SearchedBlock block_;
  double best_error_ = 0;
  int best_ = 0;
  std::array<double, kSearchLanes> errors_{};
  int first_known_ = 0;
  int known_ = 0;
};

// The kernel of the fastest level that the CPU has; null if it has none. They have the arithmetic
// of `exact`.
template <class BlockScales>
ScaleSearchKernels::Errors kernel_of(MathMode math) {
#if defined(NARROWFLOAT_VECTOR_LEVELS)
  if (math == MathMode::kExact && cpu_with(Device{}, VectorLevel::kAvx2).ok()) {
    return BlockScales::Element::kBits == 4 ? kScaleSearchKernelsAvx2.of_e2m1
                                            : kScaleSearchKernelsAvx2.of_e4m3;
  }
#else
  (void)math;
#endif
  return nullptr;
}

// Rows are dense, so block b of the range starts at element b * kCols.
template <class BlockScales>
void search(const TensorView& input, const BlockScales& block_scales,
            ScaleSearchKernels::Errors errors_of, std::span<const float> col_weights,
            QuantizedWeight& output) {
  constexpr int64_t kCols = BlockScales::kCols;
  constexpr bool kIsPacked = BlockScales::Element::kBits == 4;
  const std::span<std::byte> scales = output.scales();
  const std::span<std::byte> values = output.values();
  const int64_t row_blocks = output.cols() / kCols;
  std::array<float, kMaxBlockCols> ones{};
  ones.fill(1);
  const ScaleTable<BlockScales> table(block_scales);
  parallel_for(static_cast<int64_t>(scales.size()), kSearchGrain, [&](int64_t begin, int64_t end) {
    BlockSearch<BlockScales> block_search(table, errors_of);
    std::array<float, kMaxBlockCols> x{};
    for (int64_t block = begin; block < end; ++block) {
      std::byte& scale = scales[static_cast<size_t>(block)];
      widen(input.dtype, element_pointer(input.data, input.dtype, block * kCols), kCols, x.data());
      const auto start = static_cast<uint8_t>(scale);
      const float* weights = ones.data();
      if (!col_weights.empty()) {
        const auto of_block =
            col_weights.subspan(static_cast<size_t>(block % row_blocks * kCols), kCols);
        // Columns that nothing ever came into are all alike.
        if (std::any_of(of_block.begin(), of_block.end(), [](float one) { return one > 0; })) {
          weights = of_block.data();
        }
      }
      const uint8_t best = block_search.run(x.data(), weights, start);
      if (best == start) continue;
      scale = static_cast<std::byte>(best);
      const auto code_of = [&](size_t i) {
        return static_cast<int>(BlockScales::encode(x[i], table.multipliers[best]));
      };
      const size_t first = static_cast<size_t>(block * kCols / (kIsPacked ? 2 : 1));
      for (size_t i = 0; i < static_cast<size_t>(kCols); i += kIsPacked ? 2 : 1) {
        const int code = kIsPacked ? code_of(i) | code_of(i + 1) << 4 : code_of(i);
        values[first + (kIsPacked ? i / 2 : i)] = static_cast<std::byte>(code);
      }
    }
  });
}

}  // namespace

void search_scales(const TensorView& input, MathMode math, float encode_scale,
                   std::span<const float> col_weights, QuantizedWeight& output) {
  with_block_scales(output, math, encode_scale, [&]<class BlockScales>(const BlockScales& scales) {
    search(input, scales, kernel_of<BlockScales>(math), col_weights, output);
  });
}

}  // namespace narrowfloat

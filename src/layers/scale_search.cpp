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
// Ties keep the scale of the maximum, then the smaller change of it.
#include "layers/scale_search.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "layers/block_scales.h"
#include "runtime/parallel.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

constexpr int64_t kSearchGrain = 256;  // Blocks.

template <class BlockScales>
class BlockSearch {
 public:
  explicit BlockSearch(const BlockScales& block_scales) : scales_(block_scales) {}

  // The best scale for `x`, and its codes, one a byte. `weights`: of the elements' squared errors.
  // `start`: the scale of the maximum.
  uint8_t run(const float* x, const float* weights, uint8_t start, uint8_t* codes) {
    x_ = x;
    weights_ = weights;
    float amax = 0;
    double weight = 0;  // The maximum has it.
    for (int64_t i = 0; i < BlockScales::kCols; ++i) {
      if (!std::isfinite(x[i])) return start;
      if (std::abs(x[i]) > amax) weight = static_cast<double>(weights[i]);
      amax = std::max(amax, std::abs(x[i]));
    }
    if (amax == 0 || start < BlockScales::kFirst || start > BlockScales::kLast) return start;
    best_error_ = error_of(start, codes);
    best_ = start;
    for (int stored = start - 1; stored >= BlockScales::kFirst; --stored) {
      const double clipped = static_cast<double>(amax) - largest(stored);
      if (clipped > 0 && weight * clipped * clipped >= best_error_) break;
      try_scale(stored, codes);
    }
    // Above a scale that does not clip, up to its double.
    double limit = 0;
    for (int stored = start; stored <= BlockScales::kLast; ++stored) {
      const bool clips = largest(stored) < static_cast<double>(amax);
      if (limit == 0 && !clips) limit = 2 * largest(stored);
      const bool is_double = limit > 0 && largest(stored) >= limit;
      if (is_double && BlockScales::has_half(stored)) break;
      if (stored > start) try_scale(stored, codes);
    }
    return static_cast<uint8_t>(best_);
  }

 private:
  [[nodiscard]] double largest(int stored) const {
    return static_cast<double>(BlockScales::Element::kMaxFinite) *
           static_cast<double>(scales_.decode_scale(stored));
  }

  void try_scale(int stored, uint8_t* codes) {
    std::array<uint8_t, kMaxBlockCols> tried{};
    const double error = error_of(stored, tried.data());
    if (error >= best_error_) return;
    best_error_ = error;
    best_ = stored;
    std::copy_n(tried.begin(), BlockScales::kCols, codes);
  }

  double error_of(int stored, uint8_t* codes) const {
    const float multiplier = scales_.multiplier(stored);
    const float scale = scales_.decode_scale(stored);
    double sum = 0;
    for (int64_t i = 0; i < BlockScales::kCols; ++i) {
      codes[i] = BlockScales::encode(x_[i], multiplier);
      // A product of a code and a scale rounds as in a reader.
      const double error = static_cast<double>(x_[i]) -
                           static_cast<double>(BlockScales::Element::decode(codes[i]) * scale);
      sum += static_cast<double>(weights_[i]) * error * error;
    }
    return sum;
  }

  const BlockScales& scales_;
  const float* x_ = nullptr;
  const float* weights_ = nullptr;
  double best_error_ = 0;
  int best_ = 0;
};

// Rows are dense, so block b of the range starts at element b * kCols.
template <class BlockScales>
void search(const TensorView& input, const BlockScales& block_scales,
            std::span<const float> col_weights, QuantizedWeight& output) {
  constexpr int64_t kCols = BlockScales::kCols;
  constexpr bool kIsPacked = BlockScales::Element::kBits == 4;
  const std::span<std::byte> scales = output.scales();
  const std::span<std::byte> values = output.values();
  const int64_t row_blocks = output.cols() / kCols;
  std::array<float, kMaxBlockCols> ones{};
  ones.fill(1);
  parallel_for(static_cast<int64_t>(scales.size()), kSearchGrain, [&](int64_t begin, int64_t end) {
    BlockSearch<BlockScales> block_search(block_scales);
    std::array<float, kMaxBlockCols> x{};
    std::array<uint8_t, kMaxBlockCols> codes{};
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
      const uint8_t best = block_search.run(x.data(), weights, start, codes.data());
      if (best == start) continue;
      scale = static_cast<std::byte>(best);
      const size_t first = static_cast<size_t>(block * kCols / (kIsPacked ? 2 : 1));
      for (size_t i = 0; i < static_cast<size_t>(kCols); i += kIsPacked ? 2 : 1) {
        const int code = kIsPacked ? codes[i] | codes[i + 1] << 4 : codes[i];
        values[first + (kIsPacked ? i / 2 : i)] = static_cast<std::byte>(code);
      }
    }
  });
}

}  // namespace

void search_scales(const TensorView& input, MathMode math, float encode_scale,
                   std::span<const float> col_weights, QuantizedWeight& output) {
  with_block_scales(output, math, encode_scale, [&](const auto& block_scales) {
    search(input, block_scales, col_weights, output);
  });
}

}  // namespace narrowfloat

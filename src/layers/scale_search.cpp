// Few scales need trying. Let m be the largest magnitude of a block and M the largest value of the
// element type.
//
//   - A scale s with M * s < m clips m, with a squared error of at least (m - M * s)^2. Where that
//     is no less than the best error so far, no smaller scale is better either.
//   - The values of scale 2s up to M * s are among those of scale s, so that 2s is never better
//   than
//     s where M * s >= m. The scales at and above twice the smallest one that does not clip are
//     left out. (E4M3's denormals have no half in E4M3, so that the smallest normal scales, their
//     doubles, are tried too.)
//
// Ties keep the scale of the maximum, then the smaller change of it.
#include "layers/scale_search.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/assert.h"
#include "formats/minifloat.h"
#include "formats/mx.h"
#include "formats/nvfp4.h"
#include "runtime/parallel.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

constexpr int64_t kSearchGrain = 256;  // Blocks.
constexpr int64_t kMaxBlockCols = 32;

// A block of NVFP4 with one scale.
template <class Math>
struct Nvfp4Candidates {
  using Element = E2M1;
  static constexpr int64_t kCols = Nvfp4::kBlockCols;
  static constexpr int kFirst = 1;  // The smallest scale; zero is stored by convention only.
  static constexpr int kLast = E4M3::kMaxCode;

  float encode_scale;
  float stored_global;
  bool global_divides;

  [[nodiscard]] float multiplier(int stored) const {
    return Nvfp4::multiplier<Math>(static_cast<uint8_t>(stored),
                                   Nvfp4::scale_pair<Math>(encode_scale));
  }
  // The factor that readers of the file multiply codes by.
  [[nodiscard]] float decode_scale(int stored) const {
    const float scale = E4M3::decode(static_cast<uint8_t>(stored));
    return global_divides ? scale / stored_global : scale * stored_global;
  }
  // Whether half of this scale is one, too.
  static bool has_half(int stored) { return stored >= 2 << E4M3::kMantissaBits; }
  static uint8_t encode(float x, float multiplier) { return Nvfp4::encode<Math>(x, multiplier); }
};

template <class Math, class Format>
struct MxCandidates {
  using Element = typename Format::Element;
  static constexpr int64_t kCols = Format::kBlockCols;
  static constexpr int kFirst = 0;
  static constexpr int kLast = UE8M0::kMaxCode;

  [[nodiscard]] float multiplier(int stored) const {
    return Format::template multiplier<Math>(static_cast<uint8_t>(stored));
  }
  [[nodiscard]] float decode_scale(int stored) const {
    return UE8M0::decode(static_cast<uint8_t>(stored));
  }
  static bool has_half(int stored) { return stored > 0; }
  static uint8_t encode(float x, float multiplier) {
    return Format::template encode<Math>(x, multiplier);
  }
};

template <class Candidates>
class BlockSearch {
 public:
  explicit BlockSearch(const Candidates& candidates) : candidates_(candidates) {}

  // The best scale for `x`, and its codes, one a byte. `start`: the scale of the maximum.
  uint8_t run(const float* x, uint8_t start, uint8_t* codes) {
    x_ = x;
    float amax = 0;
    for (int64_t i = 0; i < Candidates::kCols; ++i) {
      if (!std::isfinite(x[i])) return start;
      amax = std::max(amax, std::abs(x[i]));
    }
    if (amax == 0 || start < Candidates::kFirst || start > Candidates::kLast) return start;
    best_error_ = error_of(start, codes);
    best_ = start;
    for (int stored = start - 1; stored >= Candidates::kFirst; --stored) {
      const double clipped = static_cast<double>(amax) - largest(stored);
      if (clipped > 0 && clipped * clipped >= best_error_) break;
      try_scale(stored, codes);
    }
    // Above a scale that does not clip, up to its double.
    double limit = 0;
    for (int stored = start; stored <= Candidates::kLast; ++stored) {
      const bool clips = largest(stored) < static_cast<double>(amax);
      if (limit == 0 && !clips) limit = 2 * largest(stored);
      const bool is_double = limit > 0 && largest(stored) >= limit;
      if (is_double && Candidates::has_half(stored)) break;
      if (stored > start) try_scale(stored, codes);
    }
    return static_cast<uint8_t>(best_);
  }

 private:
  [[nodiscard]] double largest(int stored) const {
    return static_cast<double>(Candidates::Element::kMaxFinite) *
           static_cast<double>(candidates_.decode_scale(stored));
  }

  void try_scale(int stored, uint8_t* codes) {
    std::array<uint8_t, kMaxBlockCols> tried{};
    const double error = error_of(stored, tried.data());
    if (error >= best_error_) return;
    best_error_ = error;
    best_ = stored;
    std::copy_n(tried.begin(), Candidates::kCols, codes);
  }

  double error_of(int stored, uint8_t* codes) const {
    const float multiplier = candidates_.multiplier(stored);
    const float scale = candidates_.decode_scale(stored);
    double sum = 0;
    for (int64_t i = 0; i < Candidates::kCols; ++i) {
      codes[i] = Candidates::encode(x_[i], multiplier);
      // A product of a code and a scale rounds as in a reader.
      const double error = static_cast<double>(x_[i]) -
                           static_cast<double>(Candidates::Element::decode(codes[i]) * scale);
      sum += error * error;
    }
    return sum;
  }

  const Candidates& candidates_;
  const float* x_ = nullptr;
  double best_error_ = 0;
  int best_ = 0;
};

// Rows are dense, so block b of the range starts at element b * kCols.
template <class Candidates>
void search(const TensorView& input, const Candidates& candidates, QuantizedWeight& output) {
  constexpr int64_t kCols = Candidates::kCols;
  constexpr bool kIsPacked = Candidates::Element::kBits == 4;
  const std::span<std::byte> scales = output.scales();
  const std::span<std::byte> values = output.values();
  parallel_for(static_cast<int64_t>(scales.size()), kSearchGrain, [&](int64_t begin, int64_t end) {
    BlockSearch<Candidates> block_search(candidates);
    std::array<float, kMaxBlockCols> x{};
    std::array<uint8_t, kMaxBlockCols> codes{};
    for (int64_t block = begin; block < end; ++block) {
      std::byte& scale = scales[static_cast<size_t>(block)];
      widen(input.dtype, element_pointer(input.data, input.dtype, block * kCols), kCols, x.data());
      const auto start = static_cast<uint8_t>(scale);
      const uint8_t best = block_search.run(x.data(), start, codes.data());
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

template <class Math>
void search_with(const TensorView& input, float encode_scale, QuantizedWeight& output) {
  switch (output.spec().info.format) {
    case FormatId::kNvfp4:
      return search(input,
                    Nvfp4Candidates<Math>{encode_scale, output.global_scale(),
                                          output.spec().global_sense == GlobalScaleSense::kEncode},
                    output);
    case FormatId::kMxfp4:
      return search(input, MxCandidates<Math, Mxfp4>{}, output);
    default:
      NF_ASSERT(output.spec().info.format == FormatId::kMxfp8);
      return search(input, MxCandidates<Math, Mxfp8>{}, output);
  }
}

}  // namespace

void search_scales(const TensorView& input, MathMode math, float encode_scale,
                   QuantizedWeight& output) {
  if (math == MathMode::kExact) {
    search_with<ExactMath>(input, encode_scale, output);
  } else {
    search_with<FastMath>(input, encode_scale, output);
  }
}

}  // namespace narrowfloat

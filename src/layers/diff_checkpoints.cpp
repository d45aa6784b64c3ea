// Compares two checkpoints tensor by tensor: first the stored bytes, then, where they differ, the
// values. Quantized weights are dequantized in ranges of rows with their producers' arithmetic.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <optional>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "formats/minifloat.h"
#include "layers/code_statistics.h"
#include "layers/memory_plan.h"
#include "layers/value_reader.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

constexpr uint64_t kRangeBudget = uint64_t{64} << 20;  // Per side.
constexpr int64_t kDiffGrainElements = int64_t{1} << 14;

bool is_identical(const ValueReader& a, const ValueReader& b) {
  if (a.tensor().convention != b.tensor().convention) return false;
  if (a.tensor().parts.size() != b.tensor().parts.size()) return false;
  for (size_t i = 0; i < a.tensor().parts.size(); ++i) {
    if (!parts_equal(a, b, i)) return false;
  }
  return true;
}

// One side stores the encode scale, the other the decode scale, and everything else is equal: the
// values then differ by at most the rounding of the reciprocal.
bool have_reciprocal_global_scales(const ValueReader& a, const ValueReader& b) {
  const std::optional<float> a_scale = a.stored_global_scale();
  const std::optional<float> b_scale = b.stored_global_scale();
  if (!a_scale || !b_scale || a.tensor().convention == b.tensor().convention) return false;
  if (!parts_equal(a, b, 0) || !parts_equal(a, b, 1)) return false;
  const double product = static_cast<double>(*a_scale) * static_cast<double>(*b_scale);
  return std::abs(product - 1.0) <= 0x1p-22;  // Three roundings to F32, some 2^-24 each.
}

// The result of comparing the values of a pair.
struct ValueComparison {
  bool equal = true;
  bool zero_signs_differ = false;

  void add(double a, double b) {
    if (a == b) {
      zero_signs_differ = zero_signs_differ || std::signbit(a) != std::signbit(b);
    } else if (!std::isnan(a) || !std::isnan(b)) {
      equal = false;
    }
  }
};

// The factor of a whole tensor, in the direction that multiplies.
double global_factor(const ValueReader& side) {
  const auto stored = static_cast<double>(side.stored_global_scale().value_or(1.0F));
  const ConventionSpec& spec = convention_spec(*side.tensor().convention);
  return spec.global_sense == GlobalScaleSense::kEncode ? 1 / stored : stored;
}

// Whether codes and scales of both sides lie in memory as the same rows.
bool have_same_layout(const ValueReader& a, const ValueReader& b) {
  if (!a.tensor().convention || !b.tensor().convention) return false;
  return convention_info(*a.tensor().convention).format ==
             convention_info(*b.tensor().convention).format &&
         a.tensor().is_transposed == b.tensor().is_transposed;
}

void add_stored_differences(QuantizedWeight& a, QuantizedWeight& b, StoredDiff& diff) {
  const FormatInfo& format = format_info(a.spec().info.format);
  diff.codes += a.rows() * a.cols();
  diff.different_codes += count_different_codes(format, a.values(), b.values());
  diff.scales += static_cast<int64_t>(a.scales().size()) / bytes(format.scale_type);
  diff.different_scales += count_different_scales(format, a.scales(), b.scales());
}

// Ties, and products that the producer rounded to F32, may fall either way.
constexpr double kRoundingTolerance = 0x1p-18;

// Counts codes for which another code of the same block scale is nearer to the original. `limits`
// has the largest value of each block; `y` the values of the codes.
int64_t count_misrounded(const FormatInfo& format, const ClipLimits& limits, const FloatRows& x,
                         const FloatRows& y, int64_t rows, int64_t cols) {
  const bool is_packed = format.element_bits == 4;
  const double largest = static_cast<double>(is_packed ? E2M1::kMaxFinite : E4M3::kMaxFinite);
  // A piece of a row has whole blocks.
  constexpr int64_t kPiece = 1 << 11;
  std::atomic<int64_t> count = 0;
  parallel_for(rows, row_grain(kDiffGrainElements, cols), [&](int64_t begin, int64_t end) {
    std::array<double, kPiece> x_piece;
    std::array<double, kPiece> y_piece;
    std::array<double, kPiece> maxima;
    const auto is_misrounded = [&](size_t i) {
      const double scale = maxima[i / static_cast<size_t>(limits.block_cols)] / largest;
      if (!(scale > 0) || !std::isfinite(scale) || !std::isfinite(x_piece[i])) return false;
      const auto quotient = static_cast<float>(x_piece[i] / scale);
      const float code =
          is_packed ? E2M1::decode(E2M1::encode(quotient)) : E4M3::decode(E4M3::encode(quotient));
      const double nearest = std::abs(x_piece[i] - static_cast<double>(code) * scale);
      const double error = std::abs(x_piece[i] - y_piece[i]);
      return error - nearest > kRoundingTolerance * (std::abs(x_piece[i]) + scale);
    };
    int64_t found = 0;
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t first = 0; first < cols; first += kPiece) {
        const auto size = static_cast<size_t>(std::min(kPiece, cols - first));
        widen(x, row * cols + first, std::span(x_piece).first(size));
        widen(y, row * cols + first, std::span(y_piece).first(size));
        const int64_t blocks = ceil_div(static_cast<int64_t>(size), limits.block_cols);
        limits.of_blocks(row, first / limits.block_cols,
                         std::span(maxima).first(static_cast<size_t>(blocks)));
        for (size_t i = 0; i < size; ++i) found += is_misrounded(i) ? 1 : 0;
      }
    }
    count += found;
  });
  return count;
}

class CheckpointComparer {
 public:
  CheckpointComparer(const std::string& a, const std::string& b,
                     const DiffCheckpointsOptions& options)
      : a_(a), b_(b) {
    if (options.original.empty()) return;
    original_.emplace(options.original);
    original_tensors_ = recognise(*original_);
  }

  CheckpointDiff run() {
    for (const LogicalTensor& tensor : original_tensors_) originals_[tensor.name] = &tensor;
    std::map<std::string, std::pair<const LogicalTensor*, const LogicalTensor*>> pairs;
    const std::vector<LogicalTensor> a_tensors = recognise(a_);
    const std::vector<LogicalTensor> b_tensors = recognise(b_);
    for (const LogicalTensor& tensor : a_tensors) pairs[tensor.name].first = &tensor;
    for (const LogicalTensor& tensor : b_tensors) pairs[tensor.name].second = &tensor;
    for (const auto& [name, pair] : pairs) {
      TensorDiff diff = compare(pair.first, pair.second);
      diff.name = name;
      result_.equal = result_.equal && (diff.status == "identical" || diff.status == "same values");
      result_.tensors.push_back(std::move(diff));
    }
    result_.total = figures_of(total_.total());
    for (const Checkpoint* side : {&a_, &b_}) {
      result_.warnings.insert(result_.warnings.end(), side->warnings().begin(),
                              side->warnings().end());
    }
    return std::move(result_);
  }

 private:
  TensorDiff compare(const LogicalTensor* a, const LogicalTensor* b) {
    TensorDiff diff;
    if (a == nullptr || b == nullptr) {
      diff.status = b == nullptr ? "only in A" : "only in B";
      return diff;
    }
    if (a->shape != b->shape) {
      diff.status = "shape differs";
      diff.detail = shape_text(a->shape) + " and " + shape_text(b->shape);
      return diff;
    }
    ValueReader a_side(a_, *a);
    ValueReader b_side(b_, *b);
    diff.figures.elements = a->num_elements();
    diff.figures.sqnr_db = std::numeric_limits<double>::infinity();
    if (is_identical(a_side, b_side)) {
      diff.status = "identical";
      if (b->convention) diff.figures.clipped_percent = 0;
    } else if (a_side.has_values() && b_side.has_values()) {
      compare_values(a_side, b_side, diff);
    } else {
      diff.status = "different";
      diff.detail = a_side.description() == b_side.description()
                        ? "bytes of " + a_side.description() + " differ"
                        : a_side.description() + " and " + b_side.description();
    }
    return diff;
  }

  // The tensor that both were quantized from; empty if it is not known.
  [[nodiscard]] std::optional<ValueReader> original_of(const ValueReader& a,
                                                       const ValueReader& b) const {
    const auto found = originals_.find(a.tensor().name);
    if (found == originals_.end() || found->second->shape != a.tensor().shape) return std::nullopt;
    if (!a.tensor().convention || !b.tensor().convention) return std::nullopt;
    if (a.tensor().is_transposed || b.tensor().is_transposed) return std::nullopt;
    ValueReader original(*original_, *found->second);
    if (!original.has_values()) return std::nullopt;
    return original;
  }

  // Compares one side with the original, range by range.
  struct OriginalComparison {
    ErrorAccumulator errors;
    int64_t misrounded = 0;

    void add(ValueReader& side, const RowRange& range, const FloatRows& x, const FloatRows& y) {
      const ClipLimits limits = *side.clip_limits();
      add_errors(errors, range, x, y, &limits);
      misrounded += count_misrounded(format_info(side.coded().spec().info.format), limits, x, y,
                                     range.count, range.cols);
    }
    [[nodiscard]] OriginalDiff result() const {
      return {.figures = figures_of(errors.total()), .misrounded_codes = misrounded};
    }
  };

  void compare_values(ValueReader& a, ValueReader& b, TensorDiff& diff) {
    const std::vector<int64_t>& shape = a.tensor().shape;
    const int64_t cols = PlainReader::cols_of(shape);
    std::optional<ValueReader> original = original_of(a, b);
    // Tiles are 1, 128 or the rows of an expert, which both sides then have.
    RowGrid grid = {.tile = std::max(a.grid().tile, b.grid().tile),
                    .smallest = std::max(a.grid().smallest, b.grid().smallest)};
    const bool is_stored_alike = have_same_layout(a, b);
    if (is_stored_alike) grid.smallest = grid.tile;  // A block is counted in one range.
    const RowRanges ranges = plan_row_ranges(
        PlainReader::rows_of(shape), kRangeBudget, grid,
        [&](int64_t rows) { return static_cast<uint64_t>(rows * cols) * sizeof(double); });
    a.prepare(ranges.rows_at_a_time);
    b.prepare(ranges.rows_at_a_time);
    if (original) original->prepare(ranges.rows_at_a_time);
    if (is_stored_alike) {
      diff.stored = {.a_global_scale = global_factor(a), .b_global_scale = global_factor(b)};
    }
    ErrorAccumulator errors;
    OriginalComparison a_original;
    OriginalComparison b_original;
    ValueComparison values;
    for_each_range(ranges, [&](int64_t first, int64_t count) {
      const RowRange range = {first, count, cols};
      const FloatRows x = a.load(first, count);
      const FloatRows y = b.load(first, count);
      const std::optional<ClipLimits> limits = b.clip_limits();
      add_errors(errors, range, x, y, limits ? &*limits : nullptr);
      compare_elements(values, x, y, count * cols);
      if (is_stored_alike) add_stored_differences(a.coded(), b.coded(), *diff.stored);
      if (!original) return;
      const FloatRows truth = original->load(first, count);
      a_original.add(a, range, truth, x);
      b_original.add(b, range, truth, y);
    });
    diff.figures = figures_of(errors.total());
    if (original) {
      diff.a_original = a_original.result();
      diff.b_original = b_original.result();
    }
    diff.status = values.equal ? "same values" : "different";
    if (!values.equal) total_.add(errors.total());
    diff.detail = a.description() == b.description() ? a.description()
                                                     : a.description() + " and " + b.description();
    if (have_reciprocal_global_scales(a, b)) diff.detail += "; same codes, reciprocal global scale";
    if (values.equal && values.zero_signs_differ) diff.detail += "; zeros of different sign";
  }

  static void compare_elements(ValueComparison& values, const FloatRows& x, const FloatRows& y,
                               int64_t count) {
    constexpr int64_t kPiece = 1 << 11;
    std::array<double, kPiece> x_piece;
    std::array<double, kPiece> y_piece;
    for (int64_t first = 0; first < count && values.equal; first += kPiece) {
      const auto size = static_cast<size_t>(std::min(kPiece, count - first));
      widen(x, first, std::span(x_piece).first(size));
      widen(y, first, std::span(y_piece).first(size));
      for (size_t i = 0; i < size; ++i) values.add(x_piece[i], y_piece[i]);
    }
  }

  static std::string shape_text(const std::vector<int64_t>& shape) {
    return fmt::format("[{}]", fmt::join(shape, ", "));
  }

  const Checkpoint a_;
  const Checkpoint b_;
  std::optional<Checkpoint> original_;
  std::vector<LogicalTensor> original_tensors_;
  std::map<std::string_view, const LogicalTensor*> originals_;  // Key: name.
  ErrorAccumulator total_;  // Over the tensors whose values differ.
  CheckpointDiff result_;
};

}  // namespace

CheckpointDiff diff_checkpoints(const std::string& a, const std::string& b,
                                const DiffCheckpointsOptions& options) {
  return CheckpointComparer(a, b, options).run();
}

}  // namespace narrowfloat

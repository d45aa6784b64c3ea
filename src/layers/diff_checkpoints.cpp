// Compares two checkpoints tensor by tensor: first the stored bytes, then, where they differ, the
// values. Quantized weights are dequantized in ranges of rows with their producers' arithmetic.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <optional>

#include "base/throw_error.h"
#include "layers/memory_plan.h"
#include "layers/value_reader.h"

namespace narrowfloat {
namespace {

constexpr uint64_t kRangeBudget = uint64_t{64} << 20;  // Per side.

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

class CheckpointComparer {
 public:
  CheckpointComparer(const std::string& a, const std::string& b) : a_(a), b_(b) {}

  CheckpointDiff run() {
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

  void compare_values(ValueReader& a, ValueReader& b, TensorDiff& diff) {
    const std::vector<int64_t>& shape = a.tensor().shape;
    const int64_t cols = PlainReader::cols_of(shape);
    // Tiles are 1, 128 or the rows of an expert, which both sides then have.
    const RowGrid grid = {.tile = std::max(a.grid().tile, b.grid().tile),
                          .smallest = std::max(a.grid().smallest, b.grid().smallest)};
    const RowRanges ranges = plan_row_ranges(
        PlainReader::rows_of(shape), kRangeBudget, grid,
        [&](int64_t rows) { return static_cast<uint64_t>(rows * cols) * sizeof(double); });
    a.prepare(ranges.rows_at_a_time);
    b.prepare(ranges.rows_at_a_time);
    ErrorAccumulator errors;
    ValueComparison values;
    for_each_range(ranges, [&](int64_t first, int64_t count) {
      const FloatRows x = a.load(first, count);
      const FloatRows y = b.load(first, count);
      const std::optional<ClipLimits> limits = b.clip_limits();
      add_errors(errors, {first, count, cols}, x, y, limits ? &*limits : nullptr);
      compare_elements(values, x, y, count * cols);
    });
    diff.figures = figures_of(errors.total());
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
  ErrorAccumulator total_;  // Over the tensors whose values differ.
  CheckpointDiff result_;
};

}  // namespace

CheckpointDiff diff_checkpoints(const std::string& a, const std::string& b) {
  return CheckpointComparer(a, b).run();
}

}  // namespace narrowfloat

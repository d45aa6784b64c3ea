// Compares two checkpoints tensor by tensor: first the stored bytes, then, where they differ, the
// values. Quantized weights are dequantized in ranges of rows with their producers' arithmetic.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>

#include "base/throw_error.h"
#include "layers/memory_plan.h"
#include "layers/weight_reader.h"

namespace narrowfloat {
namespace {

constexpr uint64_t kRangeBudget = uint64_t{64} << 20;  // Per side.
constexpr uint64_t kCompareBytes = uint64_t{4} << 20;

// One side of a pair: a logical tensor of a checkpoint, its rows as floats.
class Side {
 public:
  Side(const Checkpoint& checkpoint, const LogicalTensor& tensor)
      : checkpoint_(checkpoint), tensor_(tensor) {}

  [[nodiscard]] const LogicalTensor& tensor() const { return tensor_; }
  [[nodiscard]] bool has_values() const { return tensor_.convention || is_float(tensor_.dtype); }
  [[nodiscard]] const CheckpointTensor& part(size_t index) const {
    return *checkpoint_.find(tensor_.parts[index]);
  }
  // Rows of the unquantized weight.
  [[nodiscard]] RowGrid grid() const {
    if (!tensor_.convention) return {.tile = 1, .smallest = 1};
    const int64_t expert_rows = tensor_.shape[tensor_.shape.size() - 2];
    if (tensor_.is_transposed) return {.tile = expert_rows, .smallest = expert_rows};
    const ConventionSpec& spec = convention_spec(*tensor_.convention);
    return {.tile = format_info(spec.info.format).block_rows, .smallest = 1};
  }
  [[nodiscard]] std::string description() const {
    return std::string(tensor_.convention ? convention_info(*tensor_.convention).name
                                          : name(tensor_.dtype));
  }
  [[nodiscard]] std::string piece(size_t part_index, uint64_t begin, uint64_t size) const {
    std::string bytes(size, '\0');
    checkpoint_.read(part(part_index), begin, std::as_writable_bytes(std::span(bytes)));
    return bytes;
  }

  // Call this before load().
  void prepare(int64_t max_rows) {
    if (tensor_.convention) {
      const CodeMatrix matrix = code_matrix(tensor_);
      const int64_t rows = std::min(rows_of_codes(max_rows), matrix.all_rows());
      coded_ = std::make_unique<QuantizedReader>(checkpoint_, tensor_, rows);
      decoded_.resize(static_cast<size_t>(rows * matrix.cols));
      if (tensor_.is_transposed) transposed_.resize(decoded_.size());
    } else {
      plain_ = std::make_unique<PlainReader>(checkpoint_, part(0), max_rows);
    }
  }

  FloatRows load(int64_t first, int64_t count) {
    if (plain_) {
      plain_->load(first, count);
      return plain_->float_rows();
    }
    const CodeMatrix matrix = code_matrix(tensor_);
    const int64_t rows = rows_of_codes(count);
    coded_->load(rows_of_codes(first), rows);
    coded_->coded().decode(
        TensorView::contiguous(decoded_.data(), DType::kF32, {rows, matrix.cols}));
    if (!tensor_.is_transposed) return {DType::kF32, std::as_bytes(std::span(decoded_)).data()};
    transpose_experts({rows / matrix.rows, matrix.rows, matrix.cols}, DType::kF32,
                      std::as_bytes(std::span(decoded_)),
                      std::as_writable_bytes(std::span(transposed_)));
    return {DType::kF32, std::as_bytes(std::span(transposed_)).data()};
  }

  [[nodiscard]] std::optional<ClipLimits> clip_limits() const {
    if (!coded_ || tensor_.is_transposed) return std::nullopt;  // The limits are per row of codes.
    return coded_->coded().clip_limits();
  }

 private:
  // Rows of codes for so many rows of the unquantized weight; whole experts where it is transposed.
  [[nodiscard]] int64_t rows_of_codes(int64_t rows) const {
    const CodeMatrix matrix = code_matrix(tensor_);
    if (!tensor_.is_transposed) return rows;
    return matrix.cols == 0 ? 0 : rows / matrix.cols * matrix.rows;
  }

  const Checkpoint& checkpoint_;
  const LogicalTensor& tensor_;
  std::unique_ptr<QuantizedReader> coded_;
  std::unique_ptr<PlainReader> plain_;
  std::vector<float> decoded_;
  std::vector<float> transposed_;
};

bool parts_equal(const Side& a, const Side& b, size_t index) {
  const TensorInfo& info = a.part(index).info;
  const TensorInfo& other = b.part(index).info;
  if (info.dtype != other.dtype || info.shape != other.shape) return false;
  for (uint64_t begin = 0; begin < info.size_bytes; begin += kCompareBytes) {
    const uint64_t size = std::min(kCompareBytes, info.size_bytes - begin);
    if (a.piece(index, begin, size) != b.piece(index, begin, size)) return false;
  }
  return true;
}

bool is_identical(const Side& a, const Side& b) {
  if (a.tensor().convention != b.tensor().convention) return false;
  if (a.tensor().parts.size() != b.tensor().parts.size()) return false;
  for (size_t i = 0; i < a.tensor().parts.size(); ++i) {
    if (!parts_equal(a, b, i)) return false;
  }
  return true;
}

float stored_global_scale(const Side& side) {
  float scale = 0;
  const std::string bytes = side.piece(2, 0, sizeof(scale));
  std::memcpy(&scale, bytes.data(), sizeof(scale));
  return scale;
}

// One side stores the encode scale, the other the decode scale, and everything else is equal: the
// values then differ by at most the rounding of the reciprocal.
bool have_reciprocal_global_scales(const Side& a, const Side& b) {
  if (!a.tensor().convention || !b.tensor().convention) return false;
  const GlobalScaleSense a_sense = convention_spec(*a.tensor().convention).global_sense;
  const GlobalScaleSense b_sense = convention_spec(*b.tensor().convention).global_sense;
  if (a_sense == GlobalScaleSense::kNone || b_sense == GlobalScaleSense::kNone) return false;
  if (a_sense == b_sense || !parts_equal(a, b, 0) || !parts_equal(a, b, 1)) return false;
  const double product =
      static_cast<double>(stored_global_scale(a)) * static_cast<double>(stored_global_scale(b));
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
    Side a_side(a_, *a);
    Side b_side(b_, *b);
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

  void compare_values(Side& a, Side& b, TensorDiff& diff) {
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

// See code_measurement.h.
#include "layers/code_measurement.h"

#include <algorithm>

#include "layers/memory_plan.h"

namespace narrowfloat {
namespace {

// Elements decoded at a time; their values stay in a cache.
constexpr int64_t kMeasureElements = int64_t{1} << 18;

// Rows of a range that are measured at a time. They split no tile of the format, or divide it.
int64_t measured_rows(const ConventionSpec& spec, int64_t rows, int64_t cols) {
  const int64_t most = kMeasureElements / std::max<int64_t>(1, cols);
  const RowGrid grid = {.tile = format_info(spec.info.format).block_rows, .smallest = 1};
  return rows <= most ? rows : std::min(rows, aligned_rows(most, grid));
}

// Copies rows [row, row + count) of `all` to `piece`.
void copy_part(std::span<const std::byte> all, std::span<std::byte> piece, int64_t row,
               int64_t count) {
  const size_t row_bytes = piece.size() / static_cast<size_t>(count);
  const auto part = all.subspan(static_cast<size_t>(row) * row_bytes, piece.size());
  std::copy(part.begin(), part.end(), piece.begin());
}

}  // namespace

CodeMeasurement::CodeMeasurement(QuantizedWeight& coded, int64_t rows)
    : coded_(coded),
      piece_rows_(measured_rows(coded.spec(), rows, coded.cols())),
      decoded_elements_(static_cast<size_t>(piece_rows_ * coded.cols())),
      decoded_(std::make_unique_for_overwrite<float[]>(decoded_elements_)) {
  if (piece_rows_ < rows) {
    piece_.emplace(coded.spec(), piece_rows_, coded.cols(), coded.global_scale());
  }
}

void CodeMeasurement::add(int64_t first, const FloatRows& x) {
  const int64_t row_bytes = coded_.cols() * bits(x.dtype) / 8;
  for (int64_t row = 0; row < coded_.rows(); row += piece_rows_) {
    const int64_t count = std::min(piece_rows_, coded_.rows() - row);
    QuantizedWeight& codes = piece_ ? copy_piece(row, count) : coded_;
    codes.decode(TensorView::contiguous(decoded_.get(), DType::kF32, {count, coded_.cols()}));
    const ClipLimits limits = codes.clip_limits();
    add_errors(errors_, {first + row, count, coded_.cols()}, {x.dtype, x.data + row * row_bytes},
               {DType::kF32, std::as_bytes(std::span(decoded_.get(), decoded_elements_)).data()},
               &limits);
  }
}

uint64_t CodeMeasurement::buffer_bytes(const ConventionSpec& spec, int64_t rows, int64_t cols) {
  const int64_t piece = measured_rows(spec, rows, cols);
  const uint64_t bytes =
      static_cast<uint64_t>(piece * cols) * sizeof(float) + error_buffer_bytes(piece);
  return piece < rows ? bytes + QuantizedWeight::buffer_bytes(spec, piece, cols) : bytes;
}

QuantizedWeight& CodeMeasurement::copy_piece(int64_t row, int64_t count) {
  piece_->set_rows(count);
  const int64_t tile = format_info(coded_.spec().info.format).block_rows;
  copy_part(coded_.values(), piece_->values(), row, count);
  copy_part(coded_.scales(), piece_->scales(), row / tile, (count + tile - 1) / tile);
  return *piece_;
}

}  // namespace narrowfloat

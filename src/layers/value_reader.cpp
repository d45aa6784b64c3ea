// See value_reader.h.
#include "layers/value_reader.h"

#include <algorithm>

namespace narrowfloat {
namespace {

constexpr uint64_t kCompareBytes = uint64_t{4} << 20;

}  // namespace

std::string ValueReader::piece(size_t part_index, uint64_t begin, uint64_t size) const {
  std::string bytes(size, '\0');
  checkpoint_.read(part(part_index), begin, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

std::optional<float> ValueReader::stored_global_scale() const {
  if (!tensor_.convention) return std::nullopt;
  if (!convention_spec(*tensor_.convention).global_scale.exists()) return std::nullopt;
  float scale = 0;
  checkpoint_.read(part(2), 0, std::as_writable_bytes(std::span(&scale, 1)));
  return scale;
}

RowGrid ValueReader::grid() const {
  if (!tensor_.convention) return {.tile = 1, .smallest = 1};
  const int64_t expert_rows = tensor_.shape[tensor_.shape.size() - 2];
  if (tensor_.is_transposed) return {.tile = expert_rows, .smallest = expert_rows};
  const ConventionSpec& spec = convention_spec(*tensor_.convention);
  return {.tile = format_info(spec.info.format).block_rows, .smallest = 1};
}

std::string ValueReader::description() const {
  return std::string(tensor_.convention ? convention_info(*tensor_.convention).name
                                        : name(tensor_.dtype));
}

void ValueReader::prepare(int64_t max_rows) {
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

FloatRows ValueReader::load(int64_t first, int64_t count) {
  if (plain_) {
    plain_->load(first, count);
    return plain_->float_rows();
  }
  const CodeMatrix matrix = code_matrix(tensor_);
  const int64_t rows = rows_of_codes(count);
  coded_->load(rows_of_codes(first), rows);
  coded_->coded().decode(TensorView::contiguous(decoded_.data(), DType::kF32, {rows, matrix.cols}));
  if (!tensor_.is_transposed) return {DType::kF32, std::as_bytes(std::span(decoded_)).data()};
  transpose_experts({rows / matrix.rows, matrix.rows, matrix.cols}, DType::kF32,
                    std::as_bytes(std::span(decoded_)),
                    std::as_writable_bytes(std::span(transposed_)));
  return {DType::kF32, std::as_bytes(std::span(transposed_)).data()};
}

std::optional<ClipLimits> ValueReader::clip_limits() const {
  if (!coded_ || tensor_.is_transposed) return std::nullopt;  // The limits are per row of codes.
  return coded_->coded().clip_limits();
}

// Rows of codes for so many rows of the unquantized weight; whole experts where it is transposed.
int64_t ValueReader::rows_of_codes(int64_t rows) const {
  const CodeMatrix matrix = code_matrix(tensor_);
  if (!tensor_.is_transposed) return rows;
  return matrix.cols == 0 ? 0 : rows / matrix.cols * matrix.rows;
}

bool parts_equal(const ValueReader& a, const ValueReader& b, size_t index) {
  const TensorInfo& info = a.part(index).info;
  const TensorInfo& other = b.part(index).info;
  if (info.dtype != other.dtype || info.shape != other.shape) return false;
  for (uint64_t begin = 0; begin < info.size_bytes; begin += kCompareBytes) {
    const uint64_t size = std::min(kCompareBytes, info.size_bytes - begin);
    if (a.piece(index, begin, size) != b.piece(index, begin, size)) return false;
  }
  return true;
}

}  // namespace narrowfloat

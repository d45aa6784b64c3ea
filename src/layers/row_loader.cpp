// See row_loader.h.
#include "layers/row_loader.h"

#include <algorithm>
#include <cstring>

namespace narrowfloat {
namespace {

// A run of rows of one source: row i of it is row first + i * step of the range.
struct Piece {
  const SourceRows& source;
  int64_t source_first;
  int64_t count;
  int64_t first;
  int64_t step;
};

// Copies every `stride`-th row of `from` to every `step`-th of `to`.
template <typename Element>
void copy_rows(std::span<const Element> from, int64_t stride, std::span<Element> to,
               const Piece& piece, size_t row_size) {
  for (int64_t i = 0; i < piece.count; ++i) {
    const auto row = from.subspan(static_cast<size_t>(i * stride) * row_size, row_size);
    std::copy(row.begin(), row.end(),
              to.begin() + static_cast<std::ptrdiff_t>(
                               static_cast<size_t>(piece.first + i * piece.step) * row_size));
  }
}

// Rows that are read to get `count` rows at this distance.
int64_t rows_read(int64_t count, int64_t stride) { return (count - 1) * stride + 1; }

// Rows of one source in a range of `rows`.
int64_t piece_rows(const TargetWeight& weight, int64_t rows) {
  return weight.is_simple() ? rows : weight.rows / weight.ways();
}

}  // namespace

const ConventionSpec& source_spec(const TargetWeight& weight) {
  return convention_spec(*weight.sources.front().tensor->convention);
}

RowLoader::RowLoader(const Checkpoint& checkpoint, const TargetWeight& weight)
    : checkpoint_(checkpoint), weight_(weight) {}

RowGrid RowLoader::grid(const TargetWeight& weight) {
  const int64_t tile = std::max(format_info(source_spec(weight).info.format).block_rows,
                                format_info(weight.spec->info.format).block_rows);
  if (weight.is_simple()) return {.tile = tile, .smallest = tile};
  return {.tile = weight.rows, .smallest = weight.rows};
}

uint64_t RowLoader::buffer_bytes(const TargetWeight& weight, int64_t rows, bool as_values) {
  const ConventionSpec& spec = source_spec(weight);
  const int64_t stride = weight.sources.front().stride;
  const int64_t read = rows_read(std::max<int64_t>(1, piece_rows(weight, rows)), stride);
  const uint64_t reader = QuantizedWeight::buffer_bytes(spec, read, weight.cols);
  if (!as_values) return reader + QuantizedWeight::buffer_bytes(spec, rows, weight.cols);
  const bool is_direct = weight.is_simple() && stride == 1;
  return reader + (is_direct ? 0 : static_cast<uint64_t>(read * weight.cols) * sizeof(float));
}

template <typename Take>
void RowLoader::for_each_piece(int64_t first, int64_t count, Take take) {
  if (weight_.is_simple()) {
    take(Piece{weight_.sources.front(), first, count, 0, 1});
    return;
  }
  const int64_t ways = weight_.ways();
  for (int64_t expert = first / weight_.rows; expert < (first + count) / weight_.rows; ++expert) {
    for (int64_t way = 0; way < ways; ++way) {
      take(Piece{weight_.sources[static_cast<size_t>(expert * ways + way)], 0, weight_.rows / ways,
                 expert * weight_.rows - first + way, ways});
    }
  }
}

QuantizedReader& RowLoader::load(const SourceRows& source, int64_t first, int64_t count) {
  const int64_t rows = rows_read(count, source.stride);
  if (reads_ != source.tensor || reader_rows_ < rows) {
    reader_.reset();  // Before the next one takes memory.
    reader_.emplace(checkpoint_, *source.tensor, rows);
    reads_ = source.tensor;
    reader_rows_ = rows;
  }
  reader_->load(source.first + first * source.stride, rows);
  return *reader_;
}

void RowLoader::load_codes(int64_t first, int64_t count, QuantizedWeight& codes) {
  codes.set_rows(count);
  for_each_piece(first, count, [&](const Piece& piece) {
    QuantizedWeight& loaded = load(piece.source, piece.source_first, piece.count).coded();
    const int64_t stride = piece.source.stride;
    if (stride == 1 && piece.step == 1) {
      // Also of tiles of rows, whose scales are no rows.
      const auto copy = [&](std::span<const std::byte> from, std::span<std::byte> to) {
        const size_t before =
            to.size() / static_cast<size_t>(count) * static_cast<size_t>(piece.first);
        std::copy(from.begin(), from.end(), to.begin() + static_cast<std::ptrdiff_t>(before));
      };
      copy(loaded.values(), codes.values());
      copy(loaded.scales(), codes.scales());
      return;
    }
    const auto rows = static_cast<size_t>(count);
    copy_rows<std::byte>(loaded.values(), stride, codes.values(), piece,
                         codes.values().size() / rows);
    copy_rows<std::byte>(loaded.scales(), stride, codes.scales(), piece,
                         codes.scales().size() / rows);
  });
}

void RowLoader::load_values(int64_t first, int64_t count, std::span<float> values) {
  const int64_t cols = weight_.cols;
  for_each_piece(first, count, [&](const Piece& piece) {
    QuantizedWeight& loaded = load(piece.source, piece.source_first, piece.count).coded();
    const int64_t rows = loaded.rows();
    const bool is_direct = piece.source.stride == 1 && piece.step == 1;
    std::span<float> decoded = values.subspan(static_cast<size_t>(piece.first * cols));
    if (!is_direct) {
      decoded_.resize(static_cast<size_t>(rows * cols));
      decoded = decoded_;
    }
    loaded.decode(TensorView::contiguous(decoded.data(), DType::kF32, {rows, cols}));
    if (is_direct) return;
    copy_rows<float>(decoded, piece.source.stride, values, piece, static_cast<size_t>(cols));
  });
}

}  // namespace narrowfloat

// The public shuffles: checks, selects an implementation, runs it.
#include <array>

#include <fmt/format.h>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "ops/shuffle/shuffle_problem.h"
#include "runtime/dispatch.h"
#include "tensor/view_checks.h"

namespace narrowfloat {

std::span<const ShuffleImpl> shuffle_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kShuffleSm90, kShuffleSm80,
#endif
        kShuffleCpuBaseline, kShuffleCpuReference
  };
  return kImpls;
}

std::string to_string(const ShuffleProblem& problem) {
  return fmt::format("{}{} {} rows of {} bytes in groups of {} on {}",
                     problem.is_inverse ? "un" : "",
                     problem.is_scales ? "shuffle scales" : "shuffle", problem.rows,
                     problem.row_bytes, problem.group_rows, to_string(problem.device));
}

int64_t shuffle_group_rows(int64_t epilogue_tile_m) {
  if (epilogue_tile_m < 1) {
    throw_invalid("epilogue_tile_m: expected at least 1, got {}", epilogue_tile_m);
  }
  return epilogue_tile_m % 128 == 0 ? 32 : 16;
}

namespace {

// Bytes of a run of elements. Throws if that is no whole number.
int64_t bytes_of_elements(std::string_view argument, DType dtype, int64_t count) {
  const auto total = checked_mul(count, bits(dtype));
  if (!total || *total % 8 != 0) {
    throw_invalid("{}: expected rows of whole bytes, got {} elements of {}", argument, count,
                  name(dtype));
  }
  return *total / 8;
}

void move_rows(const TensorView& input, const TensorView& output, int64_t epilogue_tile_m,
               bool is_inverse, Stream stream) {
  const int64_t group_rows = shuffle_group_rows(epilogue_tile_m);
  require_view("input", input);
  require_view("output", output);
  if (input.rank < 2) throw_invalid("input: expected [..., rows, cols], got {}", to_string(input));
  const auto last = static_cast<size_t>(input.rank - 1);
  const RowMatrix rows = require_rows("input", input, input.shape[last]);
  if (input.shape[last - 1] % group_rows != 0) {
    throw_invalid("input: expected a multiple of {} rows for epilogue_tile_m {}, got {}",
                  group_rows, epilogue_tile_m, to_string(input));
  }
  require_dtype("output", output, {input.dtype});
  require_device("output", output.device, input.device);
  if (output.rank != input.rank || output.shape != input.shape) {
    throw_invalid("output: expected the shape of the input, {}, got {}", to_string(input),
                  to_string(output));
  }
  require_dense("output", output);
  require_data("output", output);
  const std::array outputs{byte_range("output", output)};
  const std::array inputs{byte_range("input", input)};
  require_disjoint(outputs, inputs);
  const ShuffleProblem problem{
      .is_inverse = is_inverse,
      .device = input.device,
      .rows = rows.rows,
      .row_bytes = bytes_of_elements("input", input.dtype, input.shape[last]),
      .group_rows = group_rows};
  const ShuffleArgs args{.input = input.data,
                         .input_row_bytes = bytes_of_elements("input", input.dtype, rows.stride),
                         .output = output.data};
  select("shuffle", shuffle_impls(), problem).run(problem, args, stream);
}

void require_layout(std::string_view argument, const ScaleView& view, ScaleLayoutId layout) {
  if (view.layout == layout) return;
  throw_invalid("{}: expected layout {}, got {}; convert it with relayout()", argument,
                name(layout), name(view.layout));
}

void move_scales(FormatId format, const ScaleView& input, const ScaleView& output,
                 const ShuffleProblem& kind, Stream stream) {
  require_scales("input", input, format);
  require_scales("output", output, format);
  const bool is_inverse = kind.is_inverse;
  constexpr auto kShuffled = ScaleLayoutId::kSwizzled128x4;
  require_layout("input", input, is_inverse ? kShuffled : ScaleLayoutId::kLinear);
  require_layout("output", output, is_inverse ? ScaleLayoutId::kLinear : kShuffled);
  require_device("output", output.device, input.device);
  require_cuda_alignment("input", input.data, input.device);
  require_cuda_alignment("output", output.data, input.device);
  if (output.batch != input.batch || output.rows != input.rows || output.blocks != input.blocks) {
    throw_invalid("output: expected the extents of the input, {} x {} x {}, got {} x {} x {}",
                  input.batch, input.rows, input.blocks, output.batch, output.rows, output.blocks);
  }
  if (input.rows % 128 != 0) {
    throw_invalid("input: expected a multiple of 128 rows, got {}", input.rows);
  }
  const std::array outputs{byte_range("output", output)};
  const std::array inputs{byte_range("input", input)};
  require_disjoint(outputs, inputs);
  ShuffleProblem problem = kind;
  problem.is_scales = true;
  problem.device = input.device;
  problem.rows = input.batch * input.rows;
  problem.row_bytes = input.blocks;
  const ShuffleArgs args{
      .input = input.data, .input_row_bytes = input.blocks, .output = output.data};
  select("shuffle", shuffle_impls(), problem).run(problem, args, stream);
}

}  // namespace

void shuffle_rows(const TensorView& input, const TensorView& output, int64_t epilogue_tile_m,
                  Stream stream) {
  move_rows(input, output, epilogue_tile_m, false, stream);
}

void unshuffle_rows(const TensorView& input, const TensorView& output, int64_t epilogue_tile_m,
                    Stream stream) {
  move_rows(input, output, epilogue_tile_m, true, stream);
}

void shuffle_scales(FormatId format, const ScaleView& input, const ScaleView& output,
                    int64_t epilogue_tile_m, Stream stream) {
  move_scales(format, input, output, {.group_rows = shuffle_group_rows(epilogue_tile_m)}, stream);
}

void unshuffle_scales(FormatId format, const ScaleView& input, const ScaleView& output,
                      int64_t epilogue_tile_m, Stream stream) {
  move_scales(format, input, output,
              {.is_inverse = true, .group_rows = shuffle_group_rows(epilogue_tile_m)}, stream);
}

}  // namespace narrowfloat

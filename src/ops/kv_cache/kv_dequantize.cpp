// The public dequantizers of KV caches: check, select an implementation, run it.
#include <array>

#include <fmt/ranges.h>

#include "base/throw_error.h"
#include "ops/kv_cache/kv_checks.h"
#include "runtime/dispatch.h"

namespace narrowfloat {

std::span<const KvDequantizeImpl> kv_dequantize_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kKvDequantizeSm90, kKvDequantizeSm80,
#endif
        kKvDequantizeCpuBaseline, kKvDequantizeCpuReference
  };
  return kImpls;
}

std::string to_string(const KvDequantizeProblem& problem) {
  return fmt::format("{} {} x {} blocks on {}", name(problem.output),
                     fmt::join(problem.extents, "x"), fmt::join(problem.blocks, " and "),
                     to_string(problem.device));
}

namespace {

using Numbers = std::initializer_list<DType>;
constexpr Numbers kNumbers{DType::kBF16, DType::kF16, DType::kF32};

void run(const KvDequantizeProblem& problem, const KvDequantizeArgs& args, Stream stream) {
  select("kv_dequantize", kv_dequantize_impls(), problem).run(problem, args, stream);
}

struct Sequences {
  int64_t batch = 0;
  int64_t tokens = 0;
};

void set_paged_side(const KvNamed& part, const Sequences& sequences, const KvShape& shape,
                    KvLayout layout, KvDequantizeSide& side) {
  const TensorView& output = part.numbers;
  require_view(part.argument, output);
  if (output.rank != 4 || output.shape[0] != sequences.batch ||
      output.shape[1] != sequences.tokens || output.shape[2] != shape.heads) {
    throw_invalid("{}: expected [{}, {}, {}, head_dim], got {}", part.argument, sequences.batch,
                  sequences.tokens, shape.heads, to_string(output));
  }
  const std::vector<int64_t> steps =
      require_numbers(part.argument, output, {shape.number}, shape.device);
  const int64_t head_dim = require_head_dim(part.argument, output, kKvBlock);
  const KvCodeSteps stored =
      require_codes(part.codes_argument, part.codes, shape, layout, head_dim);
  side.values = bytes_of(part.codes.values);
  side.value_steps = stored.values;
  side.scales = bytes_of(part.codes.scales);
  side.scale_steps = stored.scales;
  side.output = bytes_of(output);
  side.output_steps = {steps[0], steps[1], steps[2]};
}

// The outputs may be interleaved; nothing else may share memory with them.
void require_apart(const ByteRange& output, const PagedKvCache& cache,
                   const TensorView& block_tables, const TensorView& seq_lens) {
  const std::array inputs{byte_range("cache.k.values", cache.k.values),
                          byte_range("cache.k.scales", cache.k.scales),
                          byte_range("cache.v.values", cache.v.values),
                          byte_range("cache.v.scales", cache.v.scales),
                          byte_range("block_tables", block_tables),
                          byte_range("seq_lens", seq_lens),
                          byte_range("cache.k_scale", cache.k_scale.tensor),
                          byte_range("cache.v_scale", cache.v_scale.tensor)};
  require_disjoint(std::array{output}, inputs);
}

}  // namespace

void kv_dequantize(const KvCodes& input, const TensorView& output, const KvScale& decode_scale,
                   Stream stream) {
  require_dtype("output", output, kNumbers);
  require_view("output", output);
  const int64_t cols = require_head_dim("output", output, kKvBlock);
  const RowMatrix rows = require_rows("output", output, cols);
  const int64_t row_bytes = rows.stride * (bits(output.dtype) / 8);
  require_cuda_rows("output", output.data, row_bytes, output.device);
  const auto require_input = [&](std::string_view argument, const TensorView& view,
                                 std::initializer_list<DType> allowed, int64_t width) {
    require_dtype(argument, view, allowed);
    require_device(argument, view.device, output.device);
    if (require_rows(argument, view, width).rows != rows.rows) {
      throw_invalid("{}: expected {} rows, got {}", argument, rows.rows, to_string(view));
    }
    require_dense(argument, view);
    require_cuda_alignment(argument, view.data, view.device);
  };
  require_input("input.values", input.values, {DType::kU8}, cols / 2);
  require_input("input.scales", input.scales, {DType::kF8E4M3, DType::kU8}, cols / kKvBlock);
  const std::array outputs{byte_range("output", output)};
  const std::array inputs{byte_range("input.values", input.values),
                          byte_range("input.scales", input.scales),
                          byte_range("decode_scale", decode_scale.tensor)};
  require_disjoint(outputs, inputs);
  KvDequantizeArgs args;
  args.sides[0] = {.values = bytes_of(input.values),
                   .value_steps = {cols / 2, 0, 0},
                   .scales = bytes_of(input.scales),
                   .scale_steps = {cols / kKvBlock, 0, 0},
                   .output = bytes_of(output),
                   .output_steps = {row_bytes, 0, 0},
                   .factor = require_scale("decode_scale", decode_scale, output.device, 1.0F)};
  run({.output = output.dtype,
       .device = output.device,
       .extents = {rows.rows, 1, 1},
       .blocks = {cols / kKvBlock, 0}},
      args, stream);
}

void kv_dequantize_paged(const PagedKvCache& cache, const TensorView& block_tables,
                         const TensorView& seq_lens, const TensorView& output_k,
                         const TensorView& output_v, Stream stream) {
  require_dtype("output_k", output_k, kNumbers);
  require_view("output_k", output_k);
  const Device device = output_k.device;
  const KvShape shape = cache_shape(cache, output_k.dtype, device);
  require_view("block_tables", block_tables);
  if (block_tables.rank != 2) {
    throw_invalid("block_tables: expected [batch, max_pages], got {}", to_string(block_tables));
  }
  if (output_k.rank != 4) {
    throw_invalid("output_k: expected [batch, max_seq, heads, head_dim], got {}",
                  to_string(output_k));
  }
  const Sequences sequences{.batch = block_tables.shape[0], .tokens = output_k.shape[1]};
  KvDequantizeArgs args;
  set_paged_side({"output_k", output_k, "cache.k", cache.k}, sequences, shape, cache.layout,
                 args.sides[0]);
  set_paged_side({"output_v", output_v, "cache.v", cache.v}, sequences, shape, cache.layout,
                 args.sides[1]);
  args.sides[0].factor = require_scale("cache.k_scale", cache.k_scale, device, 1.0F);
  args.sides[1].factor = require_scale("cache.v_scale", cache.v_scale, device, 1.0F);
  args.tables.block_tables =
      require_indices("block_tables", block_tables, block_tables.num_elements(), device);
  args.tables.seq_lens = require_indices("seq_lens", seq_lens, sequences.batch, device);
  args.tables.max_pages = block_tables.shape[1];
  args.tables.pages = shape.pages;
  args.tables.page_size = shape.page_size;
  require_apart(byte_range("output_k", output_k), cache, block_tables, seq_lens);
  require_apart(byte_range("output_v", output_v), cache, block_tables, seq_lens);
  // Without pages there is nothing to gather, and no page size to divide by.
  if (shape.pages == 0) return;
  run({.output = output_k.dtype,
       .device = device,
       .extents = {sequences.batch, sequences.tokens, shape.heads},
       .blocks = {output_k.shape[3] / kKvBlock, output_v.shape[3] / kKvBlock},
       .looks_up = true},
      args, stream);
}

}  // namespace narrowfloat

// The public quantizers of KV caches: check, select an implementation, run it.
#include <array>

#include <fmt/ranges.h>

#include "base/throw_error.h"
#include "narrowfloat/quantize.h"
#include "ops/kv_cache/kv_checks.h"
#include "runtime/dispatch.h"

namespace narrowfloat {

std::span<const KvQuantizeImpl> kv_quantize_impls() {
  static const std::array kImpls {
#if defined(NARROWFLOAT_CUDA)
    kKvQuantizeSm90, kKvQuantizeSm80,
#endif
        kKvQuantizeCpuBaseline, kKvQuantizeCpuReference
  };
  return kImpls;
}

std::string to_string(const KvQuantizeProblem& problem) {
  return fmt::format("{} {} x {} blocks {} on {}", name(problem.input),
                     fmt::join(problem.extents, "x"), fmt::join(problem.blocks, " and "),
                     name(problem.math), to_string(problem.device));
}

namespace {

using Halves = std::initializer_list<DType>;
constexpr Halves kHalves{DType::kBF16, DType::kF16};

void run(const KvQuantizeProblem& problem, const KvQuantizeArgs& args, Stream stream) {
  select("kv_quantize", kv_quantize_impls(), problem).run(problem, args, stream);
}

// Inputs must not overlap outputs. The outputs may be interleaved: halves of one stacked tensor.
void require_apart(const PagedKvCache& cache, std::initializer_list<ByteRange> inputs) {
  for (const ByteRange& output :
       {byte_range("cache.k.values", cache.k.values), byte_range("cache.k.scales", cache.k.scales),
        byte_range("cache.v.values", cache.v.values),
        byte_range("cache.v.scales", cache.v.scales)}) {
    require_disjoint(std::array{output}, inputs);
  }
}

// All inputs of an append; `indices` names the indices.
void require_append_apart(const TensorView& key, const TensorView& value, const PagedKvCache& cache,
                          std::initializer_list<ByteRange> indices) {
  require_apart(cache, {byte_range("key", key), byte_range("value", value),
                        byte_range("cache.k_scale", cache.k_scale.tensor),
                        byte_range("cache.v_scale", cache.v_scale.tensor)});
  require_apart(cache, indices);
}

// One of the two tensors of an append: [rows, heads, head_dim].
void set_append_side(const KvNamed& part, const KvShape& shape, KvLayout layout,
                     KvQuantizeSide& side) {
  const std::vector<int64_t> steps =
      require_numbers(part.argument, part.numbers, {shape.number}, shape.device);
  const int64_t head_dim = require_head_dim(part.argument, part.numbers, kKvBlock);
  const KvCodeSteps stored =
      require_codes(part.codes_argument, part.codes, shape, layout, head_dim);
  side.input = bytes_of(part.numbers);
  side.input_steps = {steps[0], 0, steps[1]};
  side.values = bytes_of(part.codes.values);
  side.value_steps = stored.values;
  side.scales = bytes_of(part.codes.scales);
  side.scale_steps = stored.scales;
}

void require_rows_and_heads(std::string_view argument, const TensorView& input, int64_t rows,
                            int64_t heads) {
  if (input.rank == 3 && input.shape[0] == rows && input.shape[1] == heads) return;
  throw_invalid("{}: expected [{} rows, {} heads, head_dim], got {}", argument, rows, heads,
                to_string(input));
}

// An append without the destinations of its rows.
struct Append {
  KvShape shape;
  KvQuantizeProblem problem;
  KvQuantizeArgs args;
};

Append prepare_append(const TensorView& key, const TensorView& value, const PagedKvCache& cache,
                      MathMode math) {
  require_math(math);
  require_view("key", key);
  require_dtype("key", key, kHalves);
  require_view("value", value);
  Append append{.shape = cache_shape(cache, key.dtype, key.device), .problem = {}, .args = {}};
  const KvShape& shape = append.shape;
  const int64_t rows = key.rank < 1 ? 0 : key.shape[0];
  require_rows_and_heads("key", key, rows, shape.heads);
  require_rows_and_heads("value", value, rows, shape.heads);
  KvQuantizeArgs& args = append.args;
  set_append_side({"key", key, "cache.k", cache.k}, shape, cache.layout, args.sides[0]);
  set_append_side({"value", value, "cache.v", cache.v}, shape, cache.layout, args.sides[1]);
  args.sides[0].factor = require_scale("cache.k_scale", cache.k_scale, key.device, 1.0F);
  args.sides[1].factor = require_scale("cache.v_scale", cache.v_scale, key.device, 1.0F);
  args.targets.pages = shape.pages;
  args.targets.page_size = shape.page_size;
  append.problem = {.input = key.dtype,
                    .math = math,
                    .rule = KvRule::kAppend,
                    .device = key.device,
                    .extents = {rows, 1, shape.heads},
                    .blocks = {key.shape[2] / kKvBlock, value.shape[2] / kKvBlock},
                    .looks_up = true};
  return append;
}

// Sets one side of a whole cache: its steps in memory order.
void set_cache_side(const KvNamed& part, const KvShape& shape, KvLayout layout,
                    KvQuantizeSide& side) {
  const TensorView& input = part.numbers;
  const KvCodes& codes = part.codes;
  const int64_t head_dim = require_head_dim(part.argument, input, 64);
  require_codes(part.codes_argument, codes, shape, layout, head_dim);
  const std::vector<int64_t> steps =
      require_numbers(part.argument, input, {shape.number}, shape.device);
  if (input.num_elements() > 0 &&
      (input.strides[2] != input.shape[3] || input.strides[1] != input.shape[2] * input.shape[3])) {
    throw_invalid("{}: expected dense pages, got strides {} and {}; make it contiguous",
                  part.argument, input.strides[1], input.strides[2]);
  }
  const auto in_memory = [](const TensorView& view) {
    return KvSteps{view.strides[0], view.strides[1], view.strides[2]};
  };
  side.input = bytes_of(input);
  side.input_steps = {steps[0], steps[1], steps[2]};
  side.values = bytes_of(codes.values);
  side.value_steps = in_memory(codes.values);
  side.scales = bytes_of(codes.scales);
  side.scale_steps = in_memory(codes.scales);
}

void require_cache_input(std::string_view argument, const TensorView& input, const KvShape& shape,
                         KvLayout layout) {
  require_view(argument, input);
  const bool is_nhd = layout == KvLayout::kNhd;
  const int64_t second = is_nhd ? shape.page_size : shape.heads;
  const int64_t third = is_nhd ? shape.heads : shape.page_size;
  if (input.rank == 4 && input.shape[0] == shape.pages && input.shape[1] == second &&
      input.shape[2] == third) {
    return;
  }
  throw_invalid("{}: expected [{}, {}, {}, head_dim] as the cache, got {}", argument, shape.pages,
                second, third, to_string(input));
}

// The encode scale. Without one it is computed from the maximum, which store_maximum() stores at
// the place of the decode scale.
KvFactor encode_factor(std::string_view argument, const KvScale& scale,
                       const TensorView& decode_scale) {
  if (scale.value || !scale.tensor.is_absent()) {
    return require_scale(argument, scale, decode_scale.device, 1.0F);
  }
  return {.device = static_cast<const float*>(decode_scale.data), .is_amax = true};
}

void store_maximum(const TensorView& input, const TensorView& decode_scale, Stream stream) {
  const int64_t page = input.shape[1] * input.shape[2] * input.shape[3];
  TensorView pages =
      TensorView::contiguous(input.data, input.dtype, {input.shape[0], page}, input.device);
  if (input.shape[0] > 1) pages.strides[0] = input.strides[0];
  tensor_amax(pages, decode_scale, stream);
}

void require_decode_output(std::string_view argument, const KvScale& scale, Device device) {
  if (scale.value || scale.tensor.is_absent()) {
    throw_invalid("{}: expected a tensor F32 [1] for the decode scale, got none", argument);
  }
  require_vector(argument, scale.tensor, DType::kF32, 1, device);
}

// Requires that no memory of a whole cache is read or written twice: codes and decode scales are
// outputs.
void require_cache_apart(const TensorView& key, const TensorView& value, const PagedKvCache& output,
                         const KvCacheQuantizeOptions& options) {
  const ByteRange k_encode = byte_range("options.k_encode_scale", options.k_encode_scale.tensor);
  const ByteRange v_encode = byte_range("options.v_encode_scale", options.v_encode_scale.tensor);
  require_apart(output, {byte_range("key", key), byte_range("value", value), k_encode, v_encode});
  const std::array decode_scales{byte_range("output.k_scale", output.k_scale.tensor),
                                 byte_range("output.v_scale", output.v_scale.tensor)};
  const std::array others{byte_range("key", key),
                          byte_range("value", value),
                          k_encode,
                          v_encode,
                          byte_range("output.k.values", output.k.values),
                          byte_range("output.k.scales", output.k.scales),
                          byte_range("output.v.values", output.v.values),
                          byte_range("output.v.scales", output.v.scales)};
  require_disjoint(decode_scales, others);
}

}  // namespace

void kv_quantize(const TensorView& input, const KvCodes& output, const KvScale& decode_scale,
                 MathMode math, Stream stream) {
  require_math(math);
  require_dtype("input", input, kHalves);
  require_view("input", input);
  const int64_t cols = require_head_dim("input", input, kKvBlock);
  const RowMatrix rows = require_rows("input", input, cols);
  const int64_t row_bytes = rows.stride * 2;
  require_cuda_rows("input", input.data, row_bytes, input.device);
  const auto require_output = [&](std::string_view argument, const TensorView& view,
                                  std::initializer_list<DType> allowed, int64_t width) {
    require_dtype(argument, view, allowed);
    require_device(argument, view.device, input.device);
    if (require_rows(argument, view, width).rows != rows.rows) {
      throw_invalid("{}: expected {} rows, got {}", argument, rows.rows, to_string(view));
    }
    require_dense(argument, view);
    require_cuda_alignment(argument, view.data, view.device);
  };
  require_output("output.values", output.values, {DType::kU8}, cols / 2);
  require_output("output.scales", output.scales, {DType::kF8E4M3, DType::kU8}, cols / kKvBlock);
  const std::array outputs{byte_range("output.values", output.values),
                           byte_range("output.scales", output.scales)};
  const std::array inputs{byte_range("input", input),
                          byte_range("decode_scale", decode_scale.tensor)};
  require_disjoint(outputs, inputs);
  KvQuantizeArgs args;
  args.sides[0] = {.input = bytes_of(input),
                   .input_steps = {row_bytes, 0, 0},
                   .values = bytes_of(output.values),
                   .value_steps = {cols / 2, 0, 0},
                   .scales = bytes_of(output.scales),
                   .scale_steps = {cols / kKvBlock, 0, 0},
                   .factor = require_scale("decode_scale", decode_scale, input.device, 1.0F)};
  run({.input = input.dtype,
       .math = math,
       .rule = KvRule::kQuantize,
       .device = input.device,
       .extents = {rows.rows, 1, 1},
       .blocks = {cols / kKvBlock, 0}},
      args, stream);
}

void kv_append_paged(const TensorView& key, const TensorView& value, const KvPositions& positions,
                     const PagedKvCache& cache, MathMode math, Stream stream) {
  Append append = prepare_append(key, value, cache, math);
  const int64_t rows = append.problem.extents[0];
  KvTargets& targets = append.args.targets;
  const auto indices = [&](std::string_view argument, const TensorView& view, int64_t count) {
    require_view(argument, view);
    if (view.dtype != positions.positions.dtype) {
      throw_invalid("{}: expected the type of positions, {}, got {}", argument,
                    name(positions.positions.dtype), name(view.dtype));
    }
    return require_indices(argument, view, count, key.device);
  };
  targets.batch_indices = indices("positions.batch_indices", positions.batch_indices, rows);
  targets.positions = indices("positions.positions", positions.positions, rows);
  targets.num_indices = positions.indices.num_elements();
  targets.indices = indices("positions.indices", positions.indices, targets.num_indices);
  targets.num_batches = positions.indptr.num_elements() - 1;
  if (positions.indptr.rank != 1 || targets.num_batches < 0) {
    throw_invalid("positions.indptr: expected [batch + 1], got {}", to_string(positions.indptr));
  }
  targets.indptr = indices("positions.indptr", positions.indptr, targets.num_batches + 1);
  require_append_apart(key, value, cache,
                       {byte_range("positions.batch_indices", positions.batch_indices),
                        byte_range("positions.positions", positions.positions),
                        byte_range("positions.indices", positions.indices),
                        byte_range("positions.indptr", positions.indptr)});
  if (append.shape.pages == 0) return;  // No row has a place.
  run(append.problem, append.args, stream);
}

void kv_append_slots(const TensorView& key, const TensorView& value, const TensorView& slots,
                     const PagedKvCache& cache, MathMode math, Stream stream) {
  Append append = prepare_append(key, value, cache, math);
  const int64_t rows = append.problem.extents[0];
  require_view("slots", slots);
  KvTargets& targets = append.args.targets;
  targets.has_slots = true;
  targets.num_slots = slots.num_elements();
  if (targets.num_slots > rows) {
    throw_invalid("slots: expected at most {} values, one a row, got {}", rows, to_string(slots));
  }
  targets.slots = require_indices("slots", slots, targets.num_slots, key.device);
  require_append_apart(key, value, cache, {byte_range("slots", slots)});
  if (append.shape.pages == 0) return;  // No row has a place.
  run(append.problem, append.args, stream);
}

void kv_quantize_paged_cache(const TensorView& key, const TensorView& value,
                             const PagedKvCache& output, const KvCacheQuantizeOptions& options,
                             Stream stream) {
  require_math(options.math);
  require_dtype("key", key, kHalves);
  const KvShape shape = cache_shape(output, key.dtype, key.device);
  require_cache_input("key", key, shape, output.layout);
  require_cache_input("value", value, shape, output.layout);
  if (shape.page_size % 4 != 0) {
    throw_invalid("output: expected a page size that is a multiple of 4, got {}", shape.page_size);
  }
  KvQuantizeArgs args;
  set_cache_side({"key", key, "output.k", output.k}, shape, output.layout, args.sides[0]);
  set_cache_side({"value", value, "output.v", output.v}, shape, output.layout, args.sides[1]);
  args.sides[1].reorders_scales = true;
  require_decode_output("output.k_scale", output.k_scale, key.device);
  require_decode_output("output.v_scale", output.v_scale, key.device);
  require_cache_apart(key, value, output, options);
  const TensorView& k_scale = output.k_scale.tensor;
  const TensorView& v_scale = output.v_scale.tensor;
  args.sides[0].decode_scale = static_cast<float*>(k_scale.data);
  args.sides[1].decode_scale = static_cast<float*>(v_scale.data);
  args.sides[0].factor = encode_factor("options.k_encode_scale", options.k_encode_scale, k_scale);
  args.sides[1].factor = encode_factor("options.v_encode_scale", options.v_encode_scale, v_scale);
  const KvQuantizeProblem problem{.input = key.dtype,
                                  .math = options.math,
                                  .rule = KvRule::kNvfp4,
                                  .device = key.device,
                                  .extents = {key.shape[0], key.shape[1], key.shape[2]},
                                  .blocks = {key.shape[3] / kKvBlock, value.shape[3] / kKvBlock},
                                  .has_heads_first = output.layout == KvLayout::kHnd};
  // The selection may refuse, so it precedes the store of a maximum.
  const KvQuantizeImpl& impl = select("kv_quantize", kv_quantize_impls(), problem);
  if (args.sides[0].factor.is_amax) store_maximum(key, k_scale, stream);
  if (args.sides[1].factor.is_amax) store_maximum(value, v_scale, stream);
  impl.run(problem, args, stream);
}

}  // namespace narrowfloat

// The CPU implementations of the KV dequantizers and of the reordering of V's scales: oracles run
// row after row, baselines run rows in parallel.
#include <algorithm>

#include "ops/kv_cache/kv_problem.h"
#include "runtime/float_environment.h"
#include "runtime/parallel.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

KvIndex index_of(const KvIndex& extents, int64_t row) {
  const int64_t rest = row / extents[2];
  return {rest / extents[1], rest % extents[1], row % extents[2]};
}

int64_t num_rows(const KvIndex& extents) { return extents[0] * extents[1] * extents[2]; }

// The product of code and scale is exact.
void dequantize_block(const uint8_t* codes, uint8_t scale, float factor, DType dtype,
                      uint8_t* output) {
  std::array<float, kKvBlock> x;
  for (size_t i = 0; i < x.size(); ++i) {
    const auto code = static_cast<uint8_t>(codes[i / 2] >> (i % 2 * 4) & 0xF);
    x[i] = mul_rn(mul_rn(E2M1::decode(code), E4M3::decode(scale)), factor);
  }
  narrow(dtype, x.data(), kKvBlock, output);
}

void dequantize_row(const KvDequantizeProblem& problem, const KvDequantizeArgs& args,
                    const KvIndex& at) {
  KvIndex from = at;
  if (problem.looks_up) {
    const KvEntry entry = args.tables.find(at[0], at[1]);
    if (entry.page < 0) return;
    from = {entry.page, entry.entry, at[2]};
  }
  for (size_t s = 0; s < kKvSides; ++s) {
    const KvDequantizeSide& side = args.sides[s];
    for (int64_t block = 0; block < problem.blocks[s]; ++block) {
      dequantize_block(side.values + kv_offset(side.value_steps, from) + block * kKvBlock / 2,
                       side.scales[kv_offset(side.scale_steps, from) + block], side.factor.get(),
                       problem.output,
                       side.output + kv_offset(side.output_steps, at) +
                           block * kKvBlock * element_bytes(problem.output));
    }
  }
}

void run_reference(const KvDequantizeProblem& problem, const KvDequantizeArgs& args,
                   Stream /*stream*/) {
  const FloatEnvironmentGuard guard;
  for (int64_t row = 0; row < num_rows(problem.extents); ++row) {
    dequantize_row(problem, args, index_of(problem.extents, row));
  }
}

void run_baseline(const KvDequantizeProblem& problem, const KvDequantizeArgs& args,
                  Stream /*stream*/) {
  constexpr int64_t kGrainBlocks = 1024;
  const int64_t blocks = std::max<int64_t>(1, problem.blocks[0] + problem.blocks[1]);
  parallel_for(num_rows(problem.extents), std::max<int64_t>(1, kGrainBlocks / blocks),
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; ++row) {
                   dequantize_row(problem, args, index_of(problem.extents, row));
                 }
               });
}

Support supports(const KvDequantizeProblem& problem) { return cpu_only(problem.device); }

// Moves the scales of one token of one head.
void move_scales(const KvReorderProblem& problem, const KvReorderArgs& args, const KvIndex& at) {
  for (int64_t block = 0; block < problem.blocks; ++block) {
    const KvScalePlace place = reordered_v_scale(at[1], block, problem.blocks);
    const KvIndex moved{at[0], place.token, at[2]};
    if (problem.is_inverse) {
      args.output[kv_offset(args.output_steps, at) + block] =
          args.input[kv_offset(args.input_steps, moved) + place.position];
    } else {
      args.output[kv_offset(args.output_steps, moved) + place.position] =
          args.input[kv_offset(args.input_steps, at) + block];
    }
  }
}

void run_reorder_reference(const KvReorderProblem& problem, const KvReorderArgs& args,
                           Stream /*stream*/) {
  for (int64_t page = 0; page < problem.pages; ++page) {
    for (int64_t token = 0; token < problem.tokens; ++token) {
      for (int64_t head = 0; head < problem.heads; ++head) {
        move_scales(problem, args, {page, token, head});
      }
    }
  }
}

void run_reorder_baseline(const KvReorderProblem& problem, const KvReorderArgs& args,
                          Stream /*stream*/) {
  constexpr int64_t kGrainScales = 16384;
  const KvIndex extents{problem.pages, problem.tokens, problem.heads};
  parallel_for(num_rows(extents),
               std::max<int64_t>(1, kGrainScales / std::max<int64_t>(1, problem.blocks)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; ++row) {
                   move_scales(problem, args, index_of(extents, row));
                 }
               });
}

Support supports_reorder(const KvReorderProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const KvDequantizeImpl kKvDequantizeCpuReference{"cpu_reference", supports, run_reference};
const KvDequantizeImpl kKvDequantizeCpuBaseline{"cpu_baseline", supports, run_baseline};
const KvReorderImpl kKvReorderCpuReference{"cpu_reference", supports_reorder,
                                           run_reorder_reference};
const KvReorderImpl kKvReorderCpuBaseline{"cpu_baseline", supports_reorder, run_reorder_baseline};

}  // namespace narrowfloat

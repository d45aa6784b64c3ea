// Both CPU implementations of the KV quantizers: the oracle runs row after row, the baseline runs
// rows in parallel. Three indices name a row: the blocks of one head of one token.
#include <algorithm>

#include "formats/block_codes.h"
#include "ops/kv_cache/kv_problem.h"
#include "runtime/float_environment.h"
#include "runtime/parallel.h"
#include "tensor/element_io.h"

namespace narrowfloat {
namespace {

template <class Math>
void quantize_block(const KvQuantizeProblem& problem, const uint8_t* input, float factor,
                    uint8_t* codes, uint8_t* scale) {
  std::array<float, kKvBlock> x;
  widen(problem.input, input, kKvBlock, x.data());
  AbsMax amax;
  amax.add(x.data(), kKvBlock);
  const BlockScale<uint8_t> block = kv_block_scale<Math>(problem.rule, amax.or_nan(), factor);
  std::array<uint8_t, kKvBlock> unpacked;
  for (size_t i = 0; i < x.size(); ++i) {
    unpacked[i] = kv_code<Math>(problem.rule, x[i], block.multiplier);
  }
  pack_codes<E2M1>(unpacked.data(), 0, kKvBlock, codes);
  *scale = block.stored;
}

void quantize_row(const KvQuantizeProblem& problem, const KvQuantizeArgs& args, const KvIndex& at) {
  constexpr int64_t kInputBytes = kKvBlock * 2;
  KvIndex to = at;
  if (problem.looks_up) {
    const KvEntry entry = args.targets.find(at[0]);
    if (entry.page < 0) return;
    to = {entry.page, entry.entry, at[2]};
  }
  for (size_t s = 0; s < kKvSides; ++s) {
    const KvQuantizeSide& side = args.sides[s];
    const float factor = problem.blocks[s] > 0 ? side.factor.get() : 0.0F;
    for (int64_t block = 0; block < problem.blocks[s]; ++block) {
      KvIndex scale_to = to;
      int64_t position = block;
      if (side.reorders_scales) {
        int64_t& token = scale_to[problem.has_heads_first ? 2 : 1];
        const KvScalePlace place = reordered_v_scale(token, block, problem.blocks[s]);
        token = place.token;
        position = place.position;
      }
      const uint8_t* input = side.input + kv_offset(side.input_steps, at) + block * kInputBytes;
      uint8_t* codes = side.values + kv_offset(side.value_steps, to) + block * kKvBlock / 2;
      uint8_t* scale = side.scales + kv_offset(side.scale_steps, scale_to) + position;
      if (problem.math == MathMode::kExact) {
        quantize_block<ExactMath>(problem, input, factor, codes, scale);
      } else {
        quantize_block<FastMath>(problem, input, factor, codes, scale);
      }
    }
  }
}

KvIndex index_of(const KvQuantizeProblem& problem, int64_t row) {
  const int64_t k = row % problem.extents[2];
  const int64_t rest = row / problem.extents[2];
  return {rest / problem.extents[1], rest % problem.extents[1], k};
}

int64_t num_rows(const KvQuantizeProblem& problem) {
  return problem.extents[0] * problem.extents[1] * problem.extents[2];
}

// Called last: the place of the decode scale may hold the maximum until then.
void store_decode_scales(const KvQuantizeArgs& args) {
  for (const KvQuantizeSide& side : args.sides) {
    if (side.decode_scale != nullptr) {
      *side.decode_scale = canonical_nan(div_rn(1.0F, side.factor.get()));
    }
  }
}

void run_reference(const KvQuantizeProblem& problem, const KvQuantizeArgs& args,
                   Stream /*stream*/) {
  const FloatEnvironmentGuard guard;
  for (int64_t row = 0; row < num_rows(problem); ++row) {
    quantize_row(problem, args, index_of(problem, row));
  }
  store_decode_scales(args);
}

void run_baseline(const KvQuantizeProblem& problem, const KvQuantizeArgs& args, Stream /*stream*/) {
  constexpr int64_t kGrainBlocks = 512;
  const int64_t blocks = std::max<int64_t>(1, problem.blocks[0] + problem.blocks[1]);
  parallel_for(num_rows(problem), std::max<int64_t>(1, kGrainBlocks / blocks),
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; ++row) {
                   quantize_row(problem, args, index_of(problem, row));
                 }
               });
  const FloatEnvironmentGuard guard;
  store_decode_scales(args);
}

Support supports(const KvQuantizeProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const KvQuantizeImpl kKvQuantizeCpuReference{"cpu_reference", supports, run_reference};
const KvQuantizeImpl kKvQuantizeCpuBaseline{"cpu_baseline", supports, run_baseline};

}  // namespace narrowfloat

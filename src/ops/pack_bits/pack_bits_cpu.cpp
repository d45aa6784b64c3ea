// Both CPU implementations of packing: the oracle sets one bit at a time, the baseline makes bytes
// in parallel, segment by segment.
#include <algorithm>
#include <cstring>

#include "base/int_math.h"
#include "ops/pack_bits/pack_bits_problem.h"
#include "runtime/parallel.h"

namespace narrowfloat {
namespace {

void store_offset(const PackBitsArgs& args, int64_t i, int64_t value) {
  if (args.offsets.is_wide) {
    static_cast<int64_t*>(args.output_offsets)[i] = value;
  } else {
    static_cast<int32_t*>(args.output_offsets)[i] = static_cast<int32_t>(value);
  }
}

// A run of elements and the byte at which its bits start.
struct Run {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t output = 0;
};

template <typename Body>
void for_runs(const PackBitsProblem& problem, const PackBitsArgs& args, const Body& body) {
  if (problem.segments < 0) return body(Run{.end = problem.elements});
  int64_t output = 0;
  store_offset(args, 0, 0);
  for (int64_t i = 0; i < problem.segments; ++i) {
    const Run run{.begin = args.offsets[i], .end = args.offsets[i + 1], .output = output};
    body(run);
    output += ceil_div(run.end - run.begin, 8);
    store_offset(args, i + 1, output);
  }
}

void run_reference(const PackBitsProblem& problem, const PackBitsArgs& args, Stream /*stream*/) {
  for_runs(problem, args, [&](const Run& run) {
    for (int64_t i = run.begin; i < run.end; ++i) {
      const int64_t position = i - run.begin;
      uint8_t& byte = args.output[run.output + position / 8];
      if (position % 8 == 0) byte = 0;
      const int64_t bit = problem.order == BitOrder::kBig ? 7 - position % 8 : position % 8;
      if (args.input[i] != 0) byte = static_cast<uint8_t>(byte | 1U << bit);
    }
  });
}

uint8_t packed_byte(const uint8_t* elements, int64_t count, bool is_big) {
  uint32_t byte = 0;
  for (int64_t i = 0; i < count; ++i) {
    byte |= (elements[i] != 0 ? 1U : 0U) << (is_big ? 7 - i : i);
  }
  return static_cast<uint8_t>(byte);
}

void run_baseline(const PackBitsProblem& problem, const PackBitsArgs& args, Stream /*stream*/) {
  constexpr int64_t kGrainBytes = 16384;
  const bool is_big = problem.order == BitOrder::kBig;
  for_runs(problem, args, [&](const Run& run) {
    parallel_for(ceil_div(run.end - run.begin, 8), kGrainBytes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = run.begin + 8 * i;
        args.output[run.output + i] =
            packed_byte(args.input + first, std::min<int64_t>(8, run.end - first), is_big);
      }
    });
  });
}

Support supports(const PackBitsProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const PackBitsImpl kPackBitsCpuReference{"cpu_reference", supports, run_reference};
const PackBitsImpl kPackBitsCpuBaseline{"cpu_baseline", supports, run_baseline};

}  // namespace narrowfloat

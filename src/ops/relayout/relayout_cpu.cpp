// Both CPU implementations of relayout: the oracle calls the layouts' public offset functions for
// one scale at a time; the baseline moves rows in parallel with the offsets inlined.
#include <algorithm>
#include <cstring>

#include "ops/relayout/relayout_problem.h"
#include "runtime/parallel.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {
namespace {

void clear(const RelayoutProblem& problem, const RelayoutArgs& args) {
  const int64_t size = problem.batch * args.output_scales * bytes(problem.type);
  if (size > 0) std::memset(args.output, 0, static_cast<size_t>(size));
}

template <typename Visitor>
void visit_stored(ScaleType type, Visitor&& visitor) {
  if (type == ScaleType::kF32) return visitor.template operator()<uint32_t>();
  visitor.template operator()<uint8_t>();
}

void run_reference(const RelayoutProblem& problem, const RelayoutArgs& args, Stream /*stream*/) {
  clear(problem, args);
  visit_stored(problem.type, [&]<typename Stored>() {
    for (int64_t batch = 0; batch < problem.batch; ++batch) {
      const auto* in = static_cast<const Stored*>(args.input) + batch * args.input_scales;
      auto* out = static_cast<Stored*>(args.output) + batch * args.output_scales;
      for (int64_t row = 0; row < problem.rows; ++row) {
        for (int64_t block = 0; block < problem.blocks; ++block) {
          out[scale_offset(problem.to, row, block, problem.rows, problem.blocks)] =
              in[scale_offset(problem.from, row, block, problem.rows, problem.blocks)];
        }
      }
    }
  });
}

template <typename Stored, typename From, typename To>
void copy_row(const RelayoutProblem& problem, const RelayoutArgs& args, int64_t flat_row) {
  const int64_t batch = flat_row / problem.rows;
  const int64_t row = flat_row % problem.rows;
  const auto* in = static_cast<const Stored*>(args.input) + batch * args.input_scales;
  auto* out = static_cast<Stored*>(args.output) + batch * args.output_scales;
  const ScaleExtents extents{problem.rows, problem.blocks};
  for (int64_t block = 0; block < problem.blocks; ++block) {
    out[To::offset(row, block, extents)] = in[From::offset(row, block, extents)];
  }
}

void run_baseline(const RelayoutProblem& problem, const RelayoutArgs& args, Stream /*stream*/) {
  constexpr int64_t kGrainScales = 16384;
  clear(problem, args);
  const int64_t grain = std::max<int64_t>(1, kGrainScales / std::max<int64_t>(1, problem.blocks));
  visit_stored(problem.type, [&]<typename Stored>() {
    visit_layout(problem.from, [&]<typename From>() {
      visit_layout(problem.to, [&]<typename To>() {
        parallel_for(problem.batch * problem.rows, grain, [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row)
            copy_row<Stored, From, To>(problem, args, row);
        });
      });
    });
  });
}

Support supports(const RelayoutProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const RelayoutImpl kRelayoutCpuReference{"cpu_reference", supports, run_reference};
const RelayoutImpl kRelayoutCpuBaseline{"cpu_baseline", supports, run_baseline};

}  // namespace narrowfloat

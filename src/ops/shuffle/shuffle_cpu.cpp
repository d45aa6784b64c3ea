// Both CPU implementations of the shuffles: the oracle follows the specification's map of old to
// new rows, one scale at a time; the baseline gathers rows in parallel.
#include <algorithm>
#include <cstring>

#include "base/int_math.h"
#include "ops/shuffle/shuffle_problem.h"
#include "runtime/parallel.h"
#include "tensor/layouts/swizzled_128x4.h"

namespace narrowfloat {
namespace {

// Old row j of a group of 32 moves to (j % 4) * 8 + j / 4, of 16 to (j % 2) * 8 + j / 2.
int64_t new_row(int64_t old_row, int64_t group_rows) {
  const int64_t j = old_row % group_rows;
  const int64_t moved = group_rows == 32 ? (j % 4) * 8 + j / 4 : (j % 2) * 8 + j / 2;
  return old_row / group_rows * group_rows + moved;
}

void copy_row(const ShuffleProblem& problem, const ShuffleArgs& args, int64_t from, int64_t to) {
  if (problem.row_bytes == 0) return;
  std::memcpy(static_cast<uint8_t*>(args.output) + to * problem.row_bytes,
              static_cast<const uint8_t*>(args.input) + from * args.input_row_bytes,
              static_cast<size_t>(problem.row_bytes));
}

void clear_padding(const ShuffleProblem& problem, const ShuffleArgs& args) {
  const int64_t size = problem.rows * round_up(problem.row_bytes, 4);
  if (!problem.is_inverse && size > 0) {
    std::memset(args.output, 0, static_cast<size_t>(size));
  }
}

// Moves the scales of one unshuffled row. Batches of whole tiles follow each other like one tensor.
void move_scales(const ShuffleProblem& problem, const ShuffleArgs& args, int64_t plain,
                 int64_t shuffled) {
  const auto* in = static_cast<const uint8_t*>(args.input);
  auto* out = static_cast<uint8_t*>(args.output);
  const ScaleExtents extents{problem.rows, problem.row_bytes};
  for (int64_t block = 0; block < problem.row_bytes; ++block) {
    const int64_t linear = plain * problem.row_bytes + block;
    const int64_t swizzled = Swizzled128x4Layout::offset(shuffled, block, extents);
    if (problem.is_inverse) {
      out[linear] = in[swizzled];
    } else {
      out[swizzled] = in[linear];
    }
  }
}

void run_reference(const ShuffleProblem& problem, const ShuffleArgs& args, Stream /*stream*/) {
  if (problem.is_scales) clear_padding(problem, args);
  for (int64_t row = 0; row < problem.rows; ++row) {
    const int64_t moved = new_row(row, problem.group_rows);
    if (problem.is_scales) {
      move_scales(problem, args, row, moved);
    } else if (problem.is_inverse) {
      copy_row(problem, args, moved, row);
    } else {
      copy_row(problem, args, row, moved);
    }
  }
}

void run_baseline(const ShuffleProblem& problem, const ShuffleArgs& args, Stream /*stream*/) {
  constexpr int64_t kGrainBytes = 65536;
  if (problem.is_scales) clear_padding(problem, args);
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, problem.row_bytes));
  parallel_for(problem.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (problem.is_scales) {
        move_scales(problem, args, row, shuffled_row(row, problem.group_rows));
      } else {
        copy_row(problem, args,
                 problem.is_inverse ? shuffled_row(row, problem.group_rows)
                                    : plain_row(row, problem.group_rows),
                 row);
      }
    }
  });
}

Support supports(const ShuffleProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const ShuffleImpl kShuffleCpuReference{"cpu_reference", supports, run_reference};
const ShuffleImpl kShuffleCpuBaseline{"cpu_baseline", supports, run_baseline};

}  // namespace narrowfloat

// A timed run of `narrowfloat moe bench` against an fp64 oracle on the same weights and inputs: of
// some tokens, with the weights of their experts only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cli/moe/bench_inputs.h"
#include "cli/moe/figures.h"

namespace narrowfloat::cli {

// Of a result: kNotChecked where no run had a slot of this rank's experts.
enum class Verdict { kCorrect, kWrong, kNotChecked };

// What is kept of a run for its check.
struct RunSample {
  std::vector<int64_t> tokens;  // With local slots.
  std::vector<float> output;    // Of those tokens.
  bool has_zeros = true;        // The output of a token of that run without local slots.
};
// ids: of the run, [T, k]; it began at token `begin`.
RunSample sample_run(const MoeConfig& config, const std::vector<float>& output,
                     std::span<const int32_t> ids, int64_t begin);

struct CheckedRun {
  int64_t tokens = 0;
  Distance error;
  // Correct: within the tolerance of the mode, and a token without local slots is all zeros.
  Verdict verdict = Verdict::kNotChecked;
};
CheckedRun check_run(const BenchInputs& inputs, bool has_bias, const RunSample& sample);

}  // namespace narrowfloat::cli

// Chooses formats by measured errors: which weights are worth more bits.
//
// Every weight starts in the format that was asked for. A step gives one weight (or all that
// loaders merge into one matrix) the next better format: MXFP8, and at last none at all. Steps are
// taken in the order of what they gain for a bit, as long as the average number of bits allows: the
// noise (squared error over squared values) that goes, over the bits that come. Noise is relative
// to its weight, and both are per element, so the size of a weight does not matter.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "layers/format_rules.h"
#include "layers/memory_plan.h"

namespace narrowfloat {

struct SearchedWeight {
  const CheckpointTensor* tensor = nullptr;
  WeightChoice choice;      // In: where it starts. Out: what it gets.
  std::string explanation;  // Why it got more, or empty.
};

struct SearchOptions {
  const ConventionSpec& base;
  double target_bits = 0;  // The average of all these weights.
  bool keep_nonfinite = false;
  std::function<bool()> cancelled;
};

// Reads every weight. Returns a summary for the report. Throws kInvalidArgument for a target that
// is less than the weights have in the format they start in, kCorruptData for a NaN or infinity.
// Abandoned (with an empty summary) if cancelled.
std::string search_formats(const Checkpoint& source, std::vector<SearchedWeight>& weights,
                           const SearchOptions& options, MemoryPlan& memory);

}  // namespace narrowfloat

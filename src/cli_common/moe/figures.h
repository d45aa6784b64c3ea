// The numbers that are reported about runs of an MoE layer: distance from an oracle, load of the
// experts, work (moe spec 12.1, 14.1).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/moe.h"

namespace narrowfloat::cli {

// rel(a, b) over all rows, and the largest rel of one row whose reference is not zero (moe
// spec 12.1). Infinite where a is not zero and the reference is, or one of both is no number.
struct Distance {
  double rel = 0;
  double row = 0;
};
Distance distance(std::span<const float> values, std::span<const float> reference, int64_t cols);

// The largest end-to-end distance from the fp64 oracle on the same inputs (G4 of moe spec 12.3).
Distance tolerance(MoeMode mode);

// Whether a result of so many rows is within a bound. A code that flips is worth more in `rel` of a
// few rows than of many, so that counts from 16 rows on (moe spec 12.1).
bool is_within(const Distance& error, const Distance& bound, int64_t rows);

// The number of tokens of every local expert (shared ones last).
std::vector<int64_t> expert_load(std::span<const int32_t> ids, const MoeConfig& config);

struct LoadSummary {
  int64_t num_hit = 0;    // Experts with at least one token.
  int64_t num_slots = 0;  // Slots of local experts.
  int64_t smallest = 0;
  int64_t largest = 0;
  double mean = 0;
};
LoadSummary summarise(std::span<const int64_t> load);
// "0-15: 3, 16-31: 13": experts by their number of tokens, in a few classes of equal width.
std::string load_histogram(std::span<const int64_t> load);

// The work of one run (moe spec 14.1).
struct LayerWork {
  double weight_bytes = 0;  // Those of the experts that were hit, block scales included.
  double other_bytes = 0;   // Input and output once; logits, or ids where they are given.
  double flops = 0;         // Those of the local slots.
};
LayerWork work_of(const MoeConfig& config, double experts_hit, double local_slots, int64_t tokens,
                  bool has_ids = false);

// No run can be faster than its bytes at the rate of memory, and its operations at that of the
// fastest dense products of these types.
struct WorkRates {
  double gb_per_s = 0;
  double tflop_per_s = 0;  // 0: not known.
};
// The rate of a GPU's tensor cores in this mode, by its compute capability.
double fastest_tflop_per_s(MoeMode mode, std::string_view compute_capability);
double floor_seconds(const LayerWork& work, const WorkRates& rates);

// Elements of both weight matrices of one expert.
double weights_per_expert(const MoeConfig& config);

}  // namespace narrowfloat::cli

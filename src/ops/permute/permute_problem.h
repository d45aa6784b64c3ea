// A permutation as data (see quantize_problem.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "moe_shared/words_to_clear.h"
#include "narrowfloat/permute.h"
#include "runtime/support.h"

namespace narrowfloat {

// Upper bound of the experts of a layer, fused shared ones included (moe spec 1.8): the size of
// arrays of counters.
inline constexpr int32_t kMaxLocalExperts = 4096;

struct PermuteProblem {
  PermutationLayout layout{};
  int32_t expert_offset = 0;
  Device device;
};
std::string to_string(const PermuteProblem& problem);

// Lengths are those of the layout; see struct Permutation.
struct PermuteArgs {
  const int32_t* ids = nullptr;  // [tokens * slots]
  int32_t* slot_to_row = nullptr;
  int32_t* row_to_token = nullptr;
  int32_t* row_to_slot = nullptr;
  int32_t* num_rows = nullptr;
  int32_t* tile_to_expert = nullptr;
  int32_t* tile_row_end = nullptr;
  int32_t* num_tiles = nullptr;
  WordsToClear cleared;  // Only kernels clear words.
};

struct PermuteImpl {
  std::string_view name;
  Support (*supports)(const PermuteProblem& problem);
  void (*run)(const PermuteProblem& problem, const PermuteArgs& args, Stream stream);
};

// The public operation; on a GPU it also clears some words of a layer.
void permute(const TensorView& ids, int32_t expert_offset, int32_t local_experts,
             const Permutation& permutation, const WordsToClear& cleared, Stream stream);

// Ordered, fastest first, the oracle last.
std::span<const PermuteImpl> permute_impls();
extern const PermuteImpl kPermuteCpuReference;
extern const PermuteImpl kPermuteCpuBaseline;
extern const PermuteImpl kPermuteSm90Block;  // Only in builds with CUDA, like the next.
extern const PermuteImpl kPermuteSm80Block;
extern const PermuteImpl kPermuteSm90Grid;
extern const PermuteImpl kPermuteSm80Grid;

}  // namespace narrowfloat

// The parts of one rank's memory for expert parallelism, and their places: a pure function of the
// configuration and the number of ranks.
//
//   | abort cell | flags of tokens | flags of results |        128 bytes each; word s: rank s
//   | counts | values | scales | row scales | ids | weights |  a block for each source
//   | results |                                                a block for each source
//
// A part has one block for each rank, of max_tokens rows, one after the other: so the rows of all
// sources are one dense tensor.
#pragma once

#include <array>
#include <cstdint>

#include "narrowfloat/expert_parallel.h"

namespace narrowfloat {

enum class ExpertPart : int {
  kCounts = 0,  // One I32 a block.
  kValues = 1,
  kScales = 2,    // Linear.
  kRowScale = 3,  // F32
  kIds = 4,       // I32 [k]
  kWeights = 5,   // F32 [k]
  kResults = 6,   // [H], or [k, H] for CombineOrder::kTopK.
};
inline constexpr int kNumExpertParts = 7;
// The parts that dispatch() sends.
inline constexpr std::array kTokenParts{ExpertPart::kCounts, ExpertPart::kValues,
                                        ExpertPart::kScales, ExpertPart::kRowScale,
                                        ExpertPart::kIds,    ExpertPart::kWeights};

struct ExpertLayout {
  struct Place {
    int64_t offset = 0;
    int64_t row_bytes = 0;  // 0: the payload has no such part.
    int64_t block_bytes = 0;
  };

  int ranks = 1;
  int64_t max_tokens = 0;
  int64_t abort = 0;
  int64_t token_flags = 0;
  int64_t result_flags = 0;
  std::array<Place, kNumExpertParts> places{};
  int64_t size_bytes = 0;

  [[nodiscard]] const Place& place(ExpertPart part) const {
    return places[static_cast<size_t>(part)];
  }
  [[nodiscard]] int64_t max_rows() const { return ranks * max_tokens; }
};

// Slots of a row of results.
int64_t result_slots(const ExpertParallelConfig& config);

// Throws kInvalidArgument for a configuration without a meaning, more ranks than experts, and sizes
// beyond 2^31 rows or 2^62 bytes.
ExpertLayout expert_layout(const ExpertParallelConfig& config, int ranks);

}  // namespace narrowfloat

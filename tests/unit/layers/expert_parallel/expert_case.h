// A layer whose experts lie on several ranks, its tokens, and what expert parallelism must return:
// the layer on one rank, or the sum of its shards in the order of ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "narrowfloat/expert_parallel.h"
#include "support/moe_case.h"
#include "support/moved_weights.h"

namespace narrowfloat::testing {

// A workspace: U8 [size] at an aligned address, full of poison.
class AlignedBytes {
 public:
  explicit AlignedBytes(int64_t size);
  AlignedBytes(const AlignedBytes&) = delete;  // Its view points into itself.
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  [[nodiscard]] const TensorView& view() const { return view_; }

 private:
  std::vector<uint8_t> storage_;
  TensorView view_;
};

// Which experts the tokens want.
enum class IdsPattern {
  kUniform,
  kZipf,         // Low ids far more often than high ones.
  kOneRank,      // All tokens want experts of the last rank.
  kDuplicates,   // Both slots of a token, or all, name one expert.
  kWithInvalid,  // Some name no expert: -1, E and beyond.
};

struct ExpertSetup {
  MoeMode mode = MoeMode::kBf16;
  int ranks = 2;
  std::vector<int64_t> tokens;  // One number for each rank.
  int32_t experts = 8;
  int32_t top_k = 2;
  int64_t max_tokens = 8;
  IdsPattern ids = IdsPattern::kUniform;
  RowFormat payload = RowFormat::kBf16;
  CombineOrder order = CombineOrder::kRank;
  DType result_dtype = DType::kBF16;
  DType out_dtype = DType::kBF16;
  std::vector<int32_t> places;  // ExpertParallelConfig::places
};

class ExpertCase {
 public:
  ExpertCase(const ExpertSetup& setup, uint64_t seed);
  ExpertCase(const ExpertCase&) = delete;
  ExpertCase& operator=(const ExpertCase&) = delete;

  [[nodiscard]] ExpertParallelConfig config() const;
  [[nodiscard]] MoeLayer layer(int rank) const;
  [[nodiscard]] int64_t tokens(int rank) const;
  [[nodiscard]] CodedRows rows(int rank) const;  // bf16
  [[nodiscard]] TensorView ids(int rank) const;
  [[nodiscard]] TensorView weights(int rank) const;
  [[nodiscard]] const ExpertSetup& setup() const { return setup_; }

  // The bytes of [tokens(rank), H] in out_dtype.
  [[nodiscard]] std::vector<uint8_t> expected(int rank) const;
  // Runs `calls` calls of one rank with a workspace full of poison, and returns the bytes of the
  // last one.
  [[nodiscard]] std::vector<uint8_t> run(ExpertParallel& group, int calls = 1) const;

 private:
  [[nodiscard]] int64_t first_token(int rank) const;
  [[nodiscard]] TensorView slots_of(const void* data, DType dtype, int rank) const;
  void draw_ids(Random& random);
  // The weights of each rank's places, and the places that the tokens' ids name.
  void place_experts();
  [[nodiscard]] int32_t num_places() const;

  ExpertSetup setup_;
  MoeCase whole_;
  std::vector<int32_t> ids_;        // As the callers give them,
  std::vector<int32_t> valid_ids_;  // and with -1 for what names no expert.
  std::vector<float> weights_;
  std::vector<int32_t> placed_ids_;
  // Weights of each rank; none without places.
  std::vector<std::unique_ptr<MovedWeights>> placed_;
};

}  // namespace narrowfloat::testing

// Facts of all-reduce patterns, names of the enumerations, and the conditions that several
// implementations share.
#include <array>

#include <fmt/format.h>

#include "base/bad_enumerator.h"
#include "base/name_table.h"
#include "ops/allreduce/allreduce_problem.h"

namespace narrowfloat {
namespace {

struct PatternRecord {
  AllReducePattern id;
  std::string_view name;
  AllReduceQuantization quantization;
  bool stores_norm;
};

using Pattern = AllReducePattern;
using Quantization = AllReduceQuantization;

// Records stand in the order of AllReducePattern.
constexpr std::array<PatternRecord, kNumAllReducePatterns> kPatterns{{
    {Pattern::kAllReduce, "allreduce", Quantization::kNone, false},
    {Pattern::kResidualRmsNorm, "residual_rmsnorm", Quantization::kNone, true},
    {Pattern::kFp8, "fp8", Quantization::kFp8Tensor, false},
    {Pattern::kNvfp4, "nvfp4", Quantization::kNvfp4, false},
    {Pattern::kNormFp8, "norm_fp8", Quantization::kFp8Tensor, true},
    {Pattern::kNormNvfp4, "norm_nvfp4", Quantization::kNvfp4, true},
    {Pattern::kMoeReduction, "moe_reduction", Quantization::kNone, false},
    {Pattern::kMoeFinalize, "moe_finalize", Quantization::kNone, false},
    {Pattern::kFp8Group, "fp8_group", Quantization::kFp8GroupUe8m0, false},
    {Pattern::kNormFp8Group, "norm_fp8_group", Quantization::kFp8GroupUe8m0, true},
    {Pattern::kFp8Token, "fp8_token", Quantization::kFp8Token, false},
    {Pattern::kNormFp8Token, "norm_fp8_token", Quantization::kFp8Token, true},
    {Pattern::kFp8Block, "fp8_block", Quantization::kFp8Block1x128, false},
    {Pattern::kNormFp8Block, "norm_fp8_block", Quantization::kFp8Block1x128, true},
    {Pattern::kMxfp8, "mxfp8", Quantization::kMxfp8, false},
    {Pattern::kNormMxfp8, "norm_mxfp8", Quantization::kMxfp8, true},
    {Pattern::kMxfp4, "mxfp4", Quantization::kMxfp4, false},
    {Pattern::kNormMxfp4, "norm_mxfp4", Quantization::kMxfp4, true},
    {Pattern::kNvfp4PerToken, "nvfp4_per_token", Quantization::kNvfp4PerToken, false},
    {Pattern::kNormNvfp4PerToken, "norm_nvfp4_per_token", Quantization::kNvfp4PerToken, true},
}};

const PatternRecord& record_of(AllReducePattern pattern) {
  return record_of(kPatterns, pattern, "all-reduce pattern");
}

std::string text_of_size(int64_t size_bytes) {
  constexpr int64_t kKiB = 1024;
  constexpr int64_t kMiB = 1024 * kKiB;
  const auto size = static_cast<double>(size_bytes);
  if (size_bytes < kKiB) return fmt::format("{} bytes", size_bytes);
  if (size_bytes < kMiB) return fmt::format("{:.1f} KiB", size / kKiB);
  return fmt::format("{:.1f} MiB", size / kMiB);
}

bool is_16_bit(DType element) { return bits(element) == 16; }

// capacity: "oneshot_bytes" or "twoshot_bytes", with its value.
Support peer_memory_condition(const AllReduceCall& call, std::string_view capacity,
                              int64_t capacity_bytes) {
  if (is_16_bit(call.workspace_element) != is_16_bit(call.problem.element)) {
    return Support::no(fmt::format("the workspace is for {} elements, the problem has {}",
                                   name(call.workspace_element), name(call.problem.element)));
  }
  if (call.ranks == 1) return Support::yes();
  if (!call.has_peer_memory) return Support::no("the workspace has no peer memory");
  if (call.ranks > kMaxRanks) return Support::no("peer memory takes up to 8 ranks");
  if (call.problem.tokens > INT32_MAX) return Support::no("takes up to 2^31 - 1 tokens");
  const int64_t message = call.message_bytes();
  if (message <= capacity_bytes) return Support::yes();
  // Sizes that rounding could make equal are given in bytes.
  const bool are_close = message - capacity_bytes < capacity_bytes / 8;
  const auto text = [&](int64_t bytes) {
    return are_close ? fmt::format("{} bytes", bytes) : text_of_size(bytes);
  };
  return Support::no(
      fmt::format("message of {} exceeds {} of {}", text(message), capacity, text(capacity_bytes)));
}

}  // namespace

std::string_view name(AllReducePattern pattern) { return record_of(pattern).name; }

std::string_view name(AllReduceQuantization quantization) {
  switch (quantization) {
    case AllReduceQuantization::kNone:
      return "none";
    case AllReduceQuantization::kFp8Tensor:
      return "fp8_tensor";
    case AllReduceQuantization::kFp8Token:
      return "fp8_token";
    case AllReduceQuantization::kFp8GroupUe8m0:
      return "fp8_group";
    case AllReduceQuantization::kFp8Block1x128:
      return "fp8_block";
    case AllReduceQuantization::kNvfp4:
      return "nvfp4";
    case AllReduceQuantization::kNvfp4PerToken:
      return "nvfp4_per_token";
    case AllReduceQuantization::kMxfp8:
      return "mxfp8";
    case AllReduceQuantization::kMxfp4:
      return "mxfp4";
  }
  throw_bad_enumerator("all-reduce quantization", static_cast<int>(quantization));
}

std::string_view name(AllReduceAlgorithm algorithm) {
  switch (algorithm) {
    case AllReduceAlgorithm::kAuto:
      return "auto";
    case AllReduceAlgorithm::kOneShot:
      return "oneshot";
    case AllReduceAlgorithm::kTwoShot:
      return "twoshot";
    case AllReduceAlgorithm::kNcclExact:
      return "nccl_exact";
    case AllReduceAlgorithm::kNccl:
      return "nccl";
    case AllReduceAlgorithm::kReference:
      return "reference";
  }
  throw_bad_enumerator("all-reduce algorithm", static_cast<int>(algorithm));
}

bool is_moe(AllReducePattern pattern) {
  return pattern == AllReducePattern::kMoeReduction || pattern == AllReducePattern::kMoeFinalize;
}

bool has_norm(AllReducePattern pattern) { return pattern != AllReducePattern::kAllReduce; }

bool stores_norm(AllReducePattern pattern) { return record_of(pattern).stores_norm; }

AllReduceSource source_of(AllReducePattern pattern) {
  if (pattern == AllReducePattern::kMoeReduction) return AllReduceSource::kMoeReduction;
  if (pattern == AllReducePattern::kMoeFinalize) return AllReduceSource::kMoeFinalize;
  return AllReduceSource::kInput;
}

AllReduceQuantization quantization_of(const AllReduceProblem& problem) {
  return is_moe(problem.pattern) ? problem.moe_quantization
                                 : record_of(problem.pattern).quantization;
}

// Ranks compare this text, so it has every member of the problem.
std::string to_string(const AllReduceProblem& problem) {
  std::string text = fmt::format("{} of {} {}x{}", name(problem.pattern), name(problem.element),
                                 problem.tokens, problem.hidden);
  if (problem.moe_quantization != AllReduceQuantization::kNone) {
    text += fmt::format(", quantized to {}", name(problem.moe_quantization));
  }
  text += fmt::format(", scales {}", name(problem.scale_layout));
  if (problem.group != 0) text += fmt::format(", groups of {}", problem.group);
  const bool is_fp32 = problem.accumulation == AllReduceAccumulation::kFp32;
  const bool is_exact = problem.exactness == AllReduceExactness::kExact;
  text += fmt::format(", {} sums, {}, {}", is_fp32 ? "fp32" : "element",
                      is_exact ? "exact" : "fast", name(problem.algorithm));
  return text;
}

std::string to_string(const AllReduceCall& call) {
  return fmt::format("{} on {} ranks of {}", to_string(call.problem), call.ranks,
                     to_string(call.device));
}

Support algorithm_condition(const AllReduceCall& call, AllReduceAlgorithm algorithm) {
  const AllReduceAlgorithm wanted = call.problem.algorithm;
  if (wanted == AllReduceAlgorithm::kAuto || wanted == algorithm) return Support::yes();
  return Support::no(fmt::format("the call asks for {}", name(wanted)));
}

Support oneshot_condition(const AllReduceCall& call) {
  return peer_memory_condition(call, "oneshot_bytes", call.capacities.oneshot_bytes);
}

Support twoshot_condition(const AllReduceCall& call) {
  return peer_memory_condition(call, "twoshot_bytes", call.capacities.twoshot_bytes);
}

}  // namespace narrowfloat

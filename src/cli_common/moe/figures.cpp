// Sums are fp64 and in one order, so figures do not depend on the number of threads.
#include "cli_common/moe/figures.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <fmt/format.h>

namespace narrowfloat::cli {
namespace {

double ratio(double error_squares, double reference_squares) {
  if (error_squares == 0) return 0;
  const double result = std::sqrt(error_squares / reference_squares);
  return std::isnan(result) ? std::numeric_limits<double>::infinity() : result;
}

// The bytes of one element of an input row as the first GEMM reads it (moe spec 14.1).
double row_element_bytes(RowFormat format) {
  switch (format) {
    case RowFormat::kFp32:
      return 4;
    case RowFormat::kBf16:
      return 2;
    case RowFormat::kFp8Static:
    case RowFormat::kFp8Token:
      return 1;
    case RowFormat::kFp8Group:
    case RowFormat::kMxfp8:
      return 1.03125;
    case RowFormat::kNvfp4:
    case RowFormat::kNvfp4PerToken:
      return 0.5625;
  }
  return 0;
}

}  // namespace

Distance distance(std::span<const float> values, std::span<const float> reference, int64_t cols) {
  const auto width = static_cast<size_t>(cols);
  Distance result;
  double total_error = 0;
  double total_reference = 0;
  for (size_t begin = 0; begin < values.size(); begin += width) {
    double row_error = 0;
    double row_reference = 0;
    for (size_t i = begin; i < begin + width; ++i) {
      const double expected = reference[i];
      row_error += (values[i] - expected) * (values[i] - expected);
      row_reference += expected * expected;
    }
    result.row = std::max(result.row, ratio(row_error, row_reference));
    total_error += row_error;
    total_reference += row_reference;
  }
  result.rel = ratio(total_error, total_reference);
  return result;
}

Distance tolerance(MoeMode mode) {
  switch (mode) {
    case MoeMode::kBf16:
    case MoeMode::kMxfp4Bf16:
    case MoeMode::kNvfp4Bf16:
    case MoeMode::kMxfp4Int8:
    case MoeMode::kNvfp4Int8:
      return {3e-3, 1e-2};
    case MoeMode::kFp8Tensor:
    case MoeMode::kFp8Block:
    case MoeMode::kMxfp4Fp8:
    case MoeMode::kNvfp4Fp8Rounded:
      return {2e-2, 6e-2};
    case MoeMode::kMxfp4Fp8Token:
    case MoeMode::kNvfp4Fp8Token:
      return {4e-2, 6e-2};
    case MoeMode::kMxfp8:
    case MoeMode::kMxfp4Mxfp8:
      return {5e-3, 4e-2};
    case MoeMode::kNvfp4:
      return {1.5e-2, 8e-2};
    case MoeMode::kNvfp4PerToken:
      return {3e-2, 1.5e-1};
    case MoeMode::kNvfp4Fp8Exact:
      return {5e-3, 2e-2};
  }
  return {};
}

bool is_within(const Distance& error, const Distance& bound, int64_t rows) {
  constexpr int64_t kMinForRel = 16;
  return error.row <= bound.row && (rows < kMinForRel || error.rel <= bound.rel);
}

std::vector<int64_t> expert_load(std::span<const int32_t> ids, const MoeConfig& config) {
  const int32_t first = config.expert_offset;
  const int32_t count = config.local_experts + config.routing.shared_experts;
  std::vector<int64_t> load(static_cast<size_t>(count));
  for (const int32_t id : ids) {
    if (id >= first && id < first + count) ++load[static_cast<size_t>(id - first)];
  }
  return load;
}

LoadSummary summarise(std::span<const int64_t> load) {
  LoadSummary summary;
  if (load.empty()) return summary;
  summary.num_hit = std::count_if(load.begin(), load.end(), [](int64_t n) { return n > 0; });
  summary.num_slots = std::accumulate(load.begin(), load.end(), int64_t{0});
  const auto [smallest, largest] = std::minmax_element(load.begin(), load.end());
  summary.smallest = *smallest;
  summary.largest = *largest;
  summary.mean = static_cast<double>(summary.num_slots) / static_cast<double>(load.size());
  return summary;
}

std::string load_histogram(std::span<const int64_t> load) {
  constexpr int64_t kMaxClasses = 8;
  if (load.empty()) return "";
  const auto [smallest, largest] = std::minmax_element(load.begin(), load.end());
  const int64_t width = (*largest - *smallest + kMaxClasses) / kMaxClasses;
  std::string text;
  for (int64_t begin = *smallest; begin <= *largest; begin += width) {
    const auto count = std::count_if(load.begin(), load.end(), [&](int64_t tokens) {
      return tokens >= begin && tokens < begin + width;
    });
    const std::string range =
        width == 1 ? std::to_string(begin) : fmt::format("{}-{}", begin, begin + width - 1);
    text += fmt::format("{}{}: {}", text.empty() ? "" : ", ", range, count);
  }
  return text;
}

double weights_per_expert(const MoeConfig& config) {
  const double halves = activation_info(config.activation.kind).is_gated ? 3 : 2;
  return halves * static_cast<double>(config.hidden) * static_cast<double>(config.inter);
}

LayerWork work_of(const MoeConfig& config, double experts_hit, double local_slots, int64_t tokens,
                  bool has_ids) {
  const MoeModeInfo& mode = moe_mode_info(config.mode);
  const double elements = weights_per_expert(config);
  const auto row_elements = static_cast<double>(tokens * config.hidden);
  const double out_bytes = bits(config.out_dtype) / 8.0;
  constexpr double kRoutingBytes = 4;  // A logit or an id has so many.
  const int32_t routing_cols = has_ids ? config.routing.top_k : config.routing.experts;
  LayerWork work;
  work.weight_bytes = experts_hit * elements * mode.bits_per_weight / 8;
  work.other_bytes = row_elements * (row_element_bytes(mode.input) + out_bytes) +
                     static_cast<double>(tokens * routing_cols) * kRoutingBytes;
  work.flops = 2 * local_slots * elements;
  return work;
}

double fastest_tflop_per_s(MoeMode mode, std::string_view compute_capability) {
  // The fastest dense products reach these rates on an H100 with 132 SMs (docs/benchmarks.md).
  constexpr double kBf16Rate = 700;
  constexpr double kFp8Rate = 1400;
  if (compute_capability != "9.0") return 0;
  switch (mode) {
    case MoeMode::kFp8Tensor:
    case MoeMode::kFp8Block:
    case MoeMode::kMxfp8:
    case MoeMode::kMxfp4Mxfp8:
    case MoeMode::kMxfp4Fp8:
    case MoeMode::kNvfp4Fp8Rounded:
    case MoeMode::kMxfp4Fp8Token:
    case MoeMode::kNvfp4Fp8Token:
      return kFp8Rate;
    case MoeMode::kBf16:
    case MoeMode::kMxfp4Bf16:
    case MoeMode::kNvfp4:
    case MoeMode::kNvfp4PerToken:
    case MoeMode::kNvfp4Bf16:
    case MoeMode::kNvfp4Fp8Exact:
      return kBf16Rate;
    case MoeMode::kMxfp4Int8:
    case MoeMode::kNvfp4Int8:
      return 0;  // No GPU has them.
  }
  return 0;
}

double floor_seconds(const LayerWork& work, const WorkRates& rates) {
  double seconds = 0;
  if (rates.gb_per_s > 0) seconds = (work.weight_bytes + work.other_bytes) / rates.gb_per_s * 1e-9;
  if (rates.tflop_per_s > 0) seconds = std::max(seconds, work.flops / rates.tflop_per_s * 1e-12);
  return seconds;
}

}  // namespace narrowfloat::cli

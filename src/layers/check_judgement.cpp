// See check_judgement.h.
#include "layers/check_judgement.h"

#include <cmath>

#include <fmt/format.h>

#include "checkpoint/conventions/convention.h"
#include "layers/weight_reader.h"

namespace narrowfloat {
namespace {

constexpr double kManyScales = 0.01;
constexpr double kTooManyScales = 0.25;
constexpr double kManyAtMaximum = 0.5;
constexpr double kManyLowBlocks = 0.1;

double share(int64_t part, int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

// The thresholds of docs/howto/read_the_error_report.md for one class of formats.
struct ErrorLimits {
  double cosine;
  double sqnr_db;
  double norm_ratio_distance;
  double clipped_percent = 100;
  double flushed_percent = 100;
};
struct ErrorThresholds {
  ErrorLimits warning;
  ErrorLimits error;
};
ErrorThresholds thresholds_of(FormatId format) {
  if (format == FormatId::kNvfp4) return {{0.990, 17, 0.03, 7, 25}, {0.98, 14, 0.1}};
  if (format == FormatId::kMxfp4) return {{0.985, 15, 0.04, 100, 35}, {0.97, 12, 0.1}};
  return {{0.9990, 27, 0.01, 100, 1}, {0.998, 24, 0.03}};
}

// GPTQ makes the errors of products smaller and those of weights larger: on models/tiny-moe by up
// to 9.4 dB of SQNR. These limits allow 10 dB more, ten times the distance of the cosine from 1 and
// four times that of the norm ratio.
ErrorLimits limits_of_gptq(ErrorLimits limits) {
  limits.cosine = 1 - 10 * (1 - limits.cosine);
  limits.sqnr_db -= 10;
  limits.norm_ratio_distance *= 4;
  return limits;
}

// Which figure is beyond the limits; empty if none is.
std::string excess(const ErrorFigures& figures, const ErrorLimits& limits) {
  if (figures.cosine < limits.cosine) {
    return fmt::format("cosine {:.5f}, at least {:.5g} was expected", figures.cosine,
                       limits.cosine);
  }
  if (std::abs(figures.norm_ratio - 1) > limits.norm_ratio_distance) {
    return fmt::format(
        "norm ratio {:.5g}, {:.5g} to {:.5g} was expected; is a global scale wrong, or "
        "inverted?",
        figures.norm_ratio, 1 - limits.norm_ratio_distance, 1 + limits.norm_ratio_distance);
  }
  if (figures.sqnr_db < limits.sqnr_db) {
    return fmt::format("SQNR {:.2f} dB, at least {} was expected", figures.sqnr_db, limits.sqnr_db);
  }
  if (figures.clipped_percent.value_or(0) > limits.clipped_percent) {
    return fmt::format("{:.1f} % clipped, at most {} was expected", *figures.clipped_percent,
                       limits.clipped_percent);
  }
  if (figures.flushed_percent > limits.flushed_percent) {
    return fmt::format("{:.1f} % flushed to zero, at most {} was expected", figures.flushed_percent,
                       limits.flushed_percent);
  }
  return "";
}

void judge_scales(const LogicalTensor& tensor, const CodeStatistics& statistics,
                  bool are_powers_of_two_declared, FindingList& findings) {
  if (statistics.nonfinite_scales > 0 || statistics.negative_scales > 0) {
    findings.error(
        rules::kBadScale, tensor.name,
        fmt::format("of {} block scales, {} are NaN or infinite and {} negative; "
                    "every value of such a block is wrong",
                    statistics.blocks, statistics.nonfinite_scales, statistics.negative_scales));
  }
  const ScaleType type = format_info(convention_info(*tensor.convention).format).scale_type;
  if (type == ScaleType::kE4M3 && statistics.zero_scales > 0) {
    findings.warning(rules::kBadScale, tensor.name,
                     fmt::format("{} of {} block scales are zero; producers store a scale that "
                                 "is not for blocks of zeros, since some kernels divide by it",
                                 statistics.zero_scales, statistics.blocks));
  }
  const auto judge = [&](int64_t count, const char* what, const char* cause) {
    const double part = share(count, statistics.blocks);
    if (part <= kManyScales) return;
    findings.add(rules::kScaleRange, part > kTooManyScales ? Severity::kError : Severity::kWarning,
                 tensor.name,
                 fmt::format("{} of {} block scales ({:.1f} %) are {}; {}", count,
                             statistics.blocks, 100 * part, what, cause));
  };
  // MX formats store the smallest scale for a block of zeros.
  const int64_t zero_blocks = type == ScaleType::kUE8M0 ? statistics.zero_blocks : 0;
  judge(statistics.denormal_scales - zero_blocks, "denormal", "is the global scale too large?");
  judge(statistics.saturated_scales, "the largest that there is", "is the global scale too small?");
  if (type == ScaleType::kF32 && statistics.uneven_scales > 0 && are_powers_of_two_declared) {
    findings.error(rules::kUneven, tensor.name,
                   fmt::format("{} of {} block scales are no powers of two, but config.json "
                               "says so (scale_fmt ue8m0); rounded without their codes they "
                               "are wrong by up to 2",
                               statistics.uneven_scales, statistics.blocks));
  }
}

void judge_code_range(const LogicalTensor& tensor, const CodeStatistics& statistics,
                      FindingList& findings) {
  const int64_t used_blocks = statistics.blocks - statistics.zero_blocks;
  const double at_maximum = share(statistics.codes_at_maximum, statistics.codes);
  const double low = share(statistics.low_blocks, used_blocks);
  if (at_maximum > kManyAtMaximum) {
    findings.warning(rules::kCodeRange, tensor.name,
                     fmt::format("{:.1f} % of the codes are the largest that there is; are the "
                                 "scales too small?",
                                 100 * at_maximum));
  }
  const bool has_blocks = convention_info(*tensor.convention).scale_extent == ScaleExtent::kBlock;
  if (has_blocks && low > kManyLowBlocks) {
    findings.warning(rules::kCodeRange, tensor.name,
                     fmt::format("in {:.1f} % of the blocks that are not zero no code reaches "
                                 "a third of the largest; are the scales too large?",
                                 100 * low));
  }
}

}  // namespace

void judge_error(const LogicalTensor& tensor, const ErrorFigures& figures, bool is_of_gptq,
                 FindingList& findings) {
  ErrorThresholds thresholds = thresholds_of(convention_info(*tensor.convention).format);
  if (is_of_gptq) {
    thresholds = {limits_of_gptq(thresholds.warning), limits_of_gptq(thresholds.error)};
  }
  const std::string error = excess(figures, thresholds.error);
  const std::string warning = excess(figures, thresholds.warning);
  if (error.empty() && warning.empty()) return;
  findings.add(rules::kThreshold, error.empty() ? Severity::kWarning : Severity::kError,
               tensor.name, "error against the source: " + (error.empty() ? warning : error));
}

void judge_statistics(const LogicalTensor& tensor, const CodeStatistics& statistics,
                      bool are_powers_of_two_declared, FindingList& findings) {
  judge_scales(tensor, statistics, are_powers_of_two_declared, findings);
  if (statistics.codes == 0) return;
  if (statistics.vanished_blocks > 0) {
    findings.error(rules::kVanished, tensor.name,
                   fmt::format("{} of {} blocks have codes but the scale zero: their values "
                               "vanish",
                               statistics.vanished_blocks, statistics.blocks));
  }
  if (statistics.nan_codes > 0) {
    findings.error(rules::kCodeRange, tensor.name,
                   fmt::format("{} of {} codes are NaN", statistics.nan_codes, statistics.codes));
  }
  if (statistics.zero_blocks == statistics.blocks) {
    findings.warning(rules::kCodeRange, tensor.name,
                     "all codes are zero; was the weight never written?");
    return;
  }
  judge_code_range(tensor, statistics, findings);
  if (statistics.zero_rows > 0 || statistics.zero_cols > 0) {
    findings.note(rules::kPadding, tensor.name,
                  fmt::format("the last {} of {} rows and the last {} of {} columns are zero: "
                              "padding, which the sizes in config.json must include",
                              statistics.zero_rows, code_matrix(tensor).all_rows(),
                              statistics.zero_cols, code_matrix(tensor).cols));
  }
}

}  // namespace narrowfloat

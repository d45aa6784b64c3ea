// See check_json.h.
#include "cli/check_json.h"

#include "cli/checkpoint_report.h"

namespace narrowfloat::cli {
namespace {

Json to_json(const CodeStatistics& statistics) {
  Json exponents = Json::array();
  for (const auto& [exponent, count] : statistics.scale_exponents) {
    exponents.push_back(Json{{"exponent", exponent}, {"count", count}});
  }
  return Json{{"codes", statistics.codes},
              {"codes_at_maximum", statistics.codes_at_maximum},
              {"nan_codes", statistics.nan_codes},
              {"code_counts", statistics.code_counts},
              {"blocks", statistics.blocks},
              {"zero_blocks", statistics.zero_blocks},
              {"low_blocks", statistics.low_blocks},
              {"vanished_blocks", statistics.vanished_blocks},
              {"nonfinite_scales", statistics.nonfinite_scales},
              {"negative_scales", statistics.negative_scales},
              {"zero_scales", statistics.zero_scales},
              {"denormal_scales", statistics.denormal_scales},
              {"saturated_scales", statistics.saturated_scales},
              {"uneven_scales", statistics.uneven_scales},
              {"smallest_scale", json_number(statistics.smallest_scale)},
              {"largest_scale", json_number(statistics.largest_scale)},
              {"scale_exponents", exponents},
              {"global_scale", json_number(statistics.global_scale)},
              {"zero_rows", statistics.zero_rows},
              {"zero_cols", statistics.zero_cols}};
}

Json to_json(const Requantization& requantization) {
  return Json{{"identical", requantization.is_identical()},
              {"different_codes", requantization.different_codes},
              {"different_scales", requantization.different_scales},
              {"other_global_scale", requantization.has_other_global_scale}};
}

}  // namespace

Json findings_json(const CheckpointCheck& check) {
  Json findings = Json::array();
  for (const Finding& finding : check.findings) {
    findings.push_back(
        Json{{"id", finding.id},
             {"severity", name(finding.severity)},
             {"tensor", finding.tensor.empty() ? Json(nullptr) : Json(finding.tensor)},
             {"message", with_option_spelling(finding.message)}});
  }
  return findings;
}

Json checked_tensors_json(const CheckpointCheck& check) {
  Json tensors = Json::array();
  for (const CheckedTensor& checked : check.tensors) {
    const LogicalTensor& tensor = checked.tensor;
    Json json{
        {"name", tensor.name},
        {"kind", tensor.convention ? convention_info(*tensor.convention).name : name(tensor.dtype)},
        {"shape", tensor.shape},
        {"size_bytes", tensor.size_bytes},
        {"statistics", nullptr},
        {"figures", nullptr},
        {"requantization", nullptr}};
    if (checked.statistics) json["statistics"] = to_json(*checked.statistics);
    if (checked.figures) json["figures"] = figures_json(*checked.figures);
    if (checked.requantization) json["requantization"] = to_json(*checked.requantization);
    tensors.push_back(std::move(json));
  }
  return tensors;
}

}  // namespace narrowfloat::cli

// See format_groups.h.
#include "layers/format_groups.h"

#include <algorithm>
#include <set>

#include <fmt/ranges.h>

#include "layers/config_rewrite.h"

namespace narrowfloat {

void FormatGroups::add(const ConventionSpec& spec, bool has_input_scale, std::string_view module) {
  auto group = std::find_if(groups_.begin(), groups_.end(), [&](const FormatGroup& known) {
    return known.spec == &spec && known.has_input_scales == has_input_scale;
  });
  if (group == groups_.end()) group = groups_.insert(group, {&spec, has_input_scale});
  group->modules.emplace_back(module);
}

bool FormatGroups::is_mixed() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [&](const FormatGroup& group) { return group.spec != groups_.front().spec; });
}

std::string FormatGroups::names() const {
  std::set<std::string_view> names;
  for (const FormatGroup& group : groups_) names.insert(group.spec->info.name);
  return fmt::format("{}", fmt::join(names, ","));
}

void FormatGroups::set_configs(const QuantizedModel& model, RewriteJob& job) const {
  nlohmann::ordered_json declaration;
  if (groups_.size() > 1) {
    declaration = mixed_quantization_config(groups_, model);
    job.extra_configs = mixed_extra_configs(groups_, model);
  } else {
    const FormatGroup& group = groups_.front();
    QuantizedModel alone = model;
    alone.has_input_scales = group.has_input_scales;
    declaration = group.spec->quantization_config(alone);
    if (group.spec->extra_config != nullptr) {
      job.extra_configs.push_back(group.spec->extra_config(alone));
    }
  }
  const std::string& config = job.source.config_text();
  if (!config.empty()) job.config_text = with_declaration(config, declaration);
}

std::vector<std::string> FormatGroups::warnings() const {
  std::vector<std::string> warnings;
  for (const FormatGroup& group : groups_) {
    if (!group.spec->needs_input_scales || group.has_input_scales) continue;
    warnings.push_back(fmt::format(
        "{} weights of {} have no activation scale, which loaders of this algorithm expect: vLLM "
        "takes another number for it; quantize with option activation_amax, or write {}",
        group.modules.size(), group.spec->info.name, modelopt_fp8_channel().info.name));
  }
  return warnings;
}

}  // namespace narrowfloat

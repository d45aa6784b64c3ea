// See model_card.h. Everything in it follows from the files, so that the same checkpoint has the
// same card.
#include "cli/model_card.h"

#include <cmath>
#include <filesystem>
#include <vector>

#include <fmt/format.h>

#include "cli_common/output.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr std::string_view kFence = "---\n";

// The lines between the fences at the start of a card, without those that this card sets.
std::string front_matter(std::string_view card) {
  if (!card.starts_with(kFence)) return "";
  card.remove_prefix(kFence.size());
  const size_t end = card.find("\n---");
  if (end == std::string_view::npos) return "";
  std::string kept;
  bool is_dropped = false;
  for (std::string_view rest = card.substr(0, end + 1); !rest.empty();) {
    const size_t line_end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, line_end);
    rest.remove_prefix(std::min(line_end + 1, rest.size()));
    const bool is_continued = line.starts_with(' ') || line.starts_with('-') || line.empty();
    if (!is_continued) {
      is_dropped = line.starts_with("base_model:") || line.starts_with("base_model_relation:");
    }
    if (!is_dropped) kept += std::string(line) + "\n";
  }
  return kept;
}

std::string last_component(const std::string& path) {
  const std::filesystem::path place = std::filesystem::path(path).lexically_normal();
  return (place.has_filename() ? place.filename() : place.parent_path().filename()).string();
}

// Names of files stand in tables and between backticks.
std::string cell(std::string_view text) {
  std::string result;
  for (const char c : escaped(text)) result += c == '|' || c == '`' ? ' ' : c;
  return result;
}

std::string facts(const ReportData& data) {
  std::string text = "| | |\n|---|---|\n";
  const auto add = [&](std::string_view what, std::string_view value) {
    text += fmt::format("| {} | {} |\n", what, value);
  };
  uint64_t file_bytes = 0;
  for (const StoredFile& file : data.files) file_bytes += file.size_bytes;
  add("size",
      data.source_bytes == 0
          ? format_bytes(file_bytes)
          : fmt::format("{}, {:.2f} times smaller than {}", format_bytes(file_bytes),
                        static_cast<double>(data.source_bytes) / static_cast<double>(file_bytes),
                        format_bytes(data.source_bytes)));
  for (const auto& [kind, sums] : data.kinds) {
    add(fmt::format("`{}`", kind),
        fmt::format("{} tensors, {:.3f} bits per weight", sums.tensors, sums.bits_per_weight()));
  }
  add("all parameters", fmt::format("{:.3f} bits", data.all.bits_per_weight()));
  if (data.has_errors()) {
    add("error of quantized weights",
        fmt::format("SQNR {} dB, cosine {:.6f}, norm ratio {:.6f}",
                    format_fixed(data.check.total.sqnr_db, 2), data.check.total.cosine,
                    data.check.total.norm_ratio));
  }
  add("`narrowfloat check`",
      data.check.passed()
          ? std::string("passed")
          : fmt::format("{} errors, {} warnings", data.check.count(Severity::kError),
                        data.check.count(Severity::kWarning)));
  if (data.num_quantized_again > 0) {
    add("reproducible",
        fmt::format("quantizing the source again gives the bytes of {} of {} weights",
                    data.num_identical, data.num_quantized_again));
  }
  return text;
}

std::string errors_by_type(const ReportData& data) {
  std::string text =
      "\n## Error by type\n\n| weights | tensors | SQNR dB: least | mean | most |\n"
      "|---|---|---|---|---|\n";
  for (const auto& [type, type_facts] : data.quantized) {
    const Spread& spread = type_facts.sqnr_db;
    if (spread.count == 0) continue;
    text += fmt::format("| `{}` | {} | {:.2f} | {:.2f} | {:.2f} |\n", cell(type), spread.count,
                        spread.least, spread.mean(), spread.most);
  }
  return text;
}

std::string kept_tensors(const ReportData& data) {
  std::string text =
      "\n## Not quantized\n\n| tensors | dtype | number | size |\n|---|---|---|---|\n";
  for (const auto& [type, type_facts] : data.kept) {
    text += fmt::format("| `{}` | {} | {} | {} |\n", cell(type), type_facts.kind,
                        type_facts.tensors, format_bytes(type_facts.size_bytes));
  }
  return text;
}

std::string origin_text(const ReportData& data) {
  std::string text = "\n## How it was made\n\n";
  const auto& metadata = data.check.metadata;
  const auto convention = metadata.find("narrowfloat.convention");
  const auto settings = metadata.find("narrowfloat.settings");
  const auto made_by = metadata.find("narrowfloat.version");
  const auto source = metadata.find("narrowfloat.source");
  if (made_by != metadata.end() && convention != metadata.end()) {
    text +=
        fmt::format("By narrowfloat {} as `{}`, weights {} calibration data", cell(made_by->second),
                    cell(convention->second), data.check.is_calibrated ? "with" : "without");
    if (settings != metadata.end()) text += fmt::format(" (`{}`)", cell(settings->second));
    text += ".\n";
  } else {
    text += "The files do not record how they were made.\n";
  }
  if (source != metadata.end()) {
    text += fmt::format("Hash of the source's headers: `{}`.\n", cell(source->second));
  }
  if (!data.check.fingerprint.empty()) {
    text += fmt::format("Hash of this checkpoint's headers: `{}`.\n", data.check.fingerprint);
  }
  if (!data.declared.empty()) {
    text += "\n`quantization_config` of config.json:\n\n```json\n" + data.declared + "\n```\n";
  }
  return text;
}

}  // namespace

std::string model_card(const ReportData& data, std::string_view source_card) {
  std::string text(kFence);
  text += front_matter(source_card);
  if (!data.against.empty()) {
    text += fmt::format("base_model: {}\nbase_model_relation: quantized\n",
                        Json(last_component(data.against)).dump());
  }
  text += std::string(kFence) + fmt::format("\n# {}\n\n", cell(data.title));
  if (!data.against.empty()) {
    text += fmt::format("`{}`, quantized.\n\n", cell(last_component(data.against)));
  }
  text += facts(data);
  if (data.has_errors()) text += errors_by_type(data);
  if (!data.kept.empty()) text += kept_tensors(data);
  return text + origin_text(data);
}

}  // namespace narrowfloat::cli

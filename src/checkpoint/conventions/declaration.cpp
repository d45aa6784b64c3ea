// Gathers every declaration first and compares them then, so that a contradiction names both.
#include "checkpoint/conventions/declaration.h"

#include <algorithm>

#include "base/throw_error.h"
#include "checkpoint/conventions/mixed_config.h"
#include "checkpoint/escape.h"
#include "checkpoint/file_io.h"
#include "checkpoint/json_guard.h"

namespace narrowfloat {
namespace {

using nlohmann::json;

constexpr const char* kModelOptFile = "hf_quant_config.json";
constexpr uint64_t kMaxConfigBytes = uint64_t{16} << 20;
constexpr const char* kConfigMember = "quantization_config";
constexpr const char* kExpertMember = "expert_dtype";

// The members that tell methods apart, for messages.
std::string describe(const json& config) {
  std::string text = string_member(config, "quant_method");
  for (const char* key : {"quant_algo", "format", "fmt"}) {
    const std::string value = string_member(config, key);
    if (!value.empty()) text += (text.empty() ? "" : ", ") + std::string(key) + " " + value;
  }
  const auto block = config.find("weight_block_size");
  if (block != config.end()) text += ", weight_block_size " + block->dump();
  return printable(text);
}

// An object without a method declares nothing; it may still list modules to leave alone.
bool declares(const json& config) {
  return config.is_object() && (config.contains("quant_method") || config.contains("quant_algo"));
}

// A member that, where it is there, must have the value that the convention fixes.
struct FixedMember {
  const char* key;
  int64_t value;
};

std::string member_problem(const json& object, const std::string& path, const FixedMember& fixed) {
  const auto member = object.find(fixed.key);
  if (member == object.end() || member->is_null() || *member == fixed.value) return "";
  return fmt::format("'{}{}' is {}, but is {} in this convention", path, fixed.key,
                     printable(member->dump(), 40), fixed.value);
}

// Compares what `config` says about weights, in itself and in its groups, with the convention it
// declares; empty if that agrees.
std::string weights_problem(const json& config, const ConventionSpec& spec) {
  const FormatInfo& format = format_info(spec.info.format);
  const FixedMember group_size{"group_size", format.block_cols};
  const bool has_groups = spec.info.scale_extent == ScaleExtent::kBlock;
  std::string problem = has_groups ? member_problem(config, "", group_size) : "";
  const auto groups = config.find("config_groups");
  if (groups == config.end() || groups->is_null()) return problem;
  if (!groups->is_object()) return "'config_groups' must be an object";
  for (const auto& [name, group] : groups->items()) {
    const std::string path = fmt::format("config_groups.{}.weights", printable(name, 40));
    const auto weights = group.is_object() ? group.find("weights") : group.end();
    if (!group.is_object() || weights == group.end() || weights->is_null()) continue;
    if (!weights->is_object()) return fmt::format("'{}' must be an object", path);
    const std::string type = string_member(*weights, "type");
    const char* const wanted = spec.info.is_integer ? "int" : "float";
    if (!type.empty() && type != wanted) {
      return fmt::format("'{}.type' is '{}', but is '{}' in this convention", path,
                         printable(type, 40), wanted);
    }
    if (problem.empty()) {
      problem = member_problem(*weights, path + ".", {"num_bits", format.element_bits});
    }
    if (problem.empty() && has_groups) problem = member_problem(*weights, path + ".", group_size);
  }
  return problem;
}

// The convention of a config that is about one format. `path`: the checkpoint's, for messages.
const ConventionSpec* find_spec(const std::string& path, const json& config,
                                const Declaration& declaration) {
  for (const ConventionSpec* spec : all_convention_specs()) {
    if (!spec->is_declared_by(config)) continue;
    const std::string problem = weights_problem(config, *spec);
    if (!problem.empty()) {
      throw_error(ErrorKind::kCorruptData, "{}: {} declares {} ({}) and contradicts itself: {}",
                  printable(path), declaration.source, spec->info.name, declaration.method,
                  problem);
    }
    return spec;
  }
  throw_error(
      ErrorKind::kUnsupported,
      "{}: {}: quantization method '{}' cannot be read; readable are {} (and ModelOpt MXFP8)",
      printable(path), declaration.source, describe(config), convention_names());
}

Declaration read_declaration(const std::string& path, const json& config,
                             const std::string& source) {
  Declaration declaration{.source = source, .method = describe(config)};
  for (const json& one : split_by_format(config)) {
    declaration.add(find_spec(path, one, declaration));
  }
  if (declaration.specs.empty()) {
    throw_error(ErrorKind::kCorruptData, "{}: {}: '{}' lists no weights", printable(path), source,
                declaration.method);
  }
  return declaration;
}

// Appends what the config of a model declares, if it does. `source`: the place of that config.
void add_declaration(const std::string& path, const json& model_config, const std::string& source,
                     std::vector<Declaration>& found) {
  if (!model_config.is_object()) return;
  const auto config = model_config.find(kConfigMember);
  if (config == model_config.end() || !declares(*config)) return;
  Declaration declaration = read_declaration(path, *config, source);
  // A member of the model's config, or of quantization_config.
  std::string experts = string_member(model_config, kExpertMember);
  if (experts.empty()) experts = string_member(*config, kExpertMember);
  if (declaration.has(&deepseek_fp8()) && experts == "fp4") {
    declaration.add(&deepseek_mxfp4());
    declaration.method += fmt::format(", {} fp4", kExpertMember);
  }
  found.push_back(std::move(declaration));
}

class DeclarationList {
 public:
  explicit DeclarationList(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  std::vector<Declaration> gather() {
    found_ = declarations_in_config(checkpoint_.config_text(), checkpoint_.path());
    read_modelopt_file();
    read_metadata();
    return std::move(found_);
  }

 private:
  void read_modelopt_file() {
    const std::vector<std::string>& files = checkpoint_.auxiliary_files();
    if (std::find(files.begin(), files.end(), kModelOptFile) == files.end()) return;
    const std::string path = join_path(checkpoint_.path(), kModelOptFile);
    const std::string text = read_file_bounded(path, kMaxConfigBytes);
    check_json_object(text, printable(path));
    const json root = json::parse(text);
    const auto quantization = root.find("quantization");
    if (quantization == root.end() || !quantization->is_object()) return;
    json config = *quantization;
    config["quant_method"] = "modelopt";
    // A null algorithm is how ModelOpt says "not quantized".
    if (!string_member(config, "quant_algo").empty()) {
      found_.push_back(read_declaration(checkpoint_.path(), config, kModelOptFile));
    }
  }

  void read_metadata() {
    for (const SafetensorsReader& shard : checkpoint_.shards()) {
      const auto entry = shard.metadata().find(kConventionKey);
      if (entry == shard.metadata().end()) continue;
      const std::string source = printable(shard.path()) + " (__metadata__)";
      Declaration declaration{.source = source, .method = printable(entry->second)};
      std::string_view names = entry->second;
      for (bool is_last = false; !is_last;) {
        const size_t comma = names.find(',');
        is_last = comma == std::string_view::npos;
        const std::string_view name = names.substr(0, comma);
        if (!is_last) names.remove_prefix(comma + 1);
        const ConventionSpec* spec = by_name(name);
        if (spec == nullptr) {
          throw_error(ErrorKind::kUnsupported,
                      "{}: convention '{}' cannot be read; readable are {}; was the file written "
                      "by a newer version?",
                      source, printable(name), convention_names());
        }
        declaration.add(spec);
      }
      found_.push_back(std::move(declaration));
    }
  }

  static const ConventionSpec* by_name(std::string_view name) {
    for (const ConventionSpec* spec : all_convention_specs()) {
      if (spec->info.name == name) return spec;
    }
    return nullptr;
  }

  const Checkpoint& checkpoint_;
  std::vector<Declaration> found_;
};

}  // namespace

// The top level, and one level down: multi-modal models nest the language model's config.
std::vector<Declaration> declarations_in_config(const std::string& config_text,
                                                const std::string& path) {
  std::vector<Declaration> found;
  if (config_text.empty()) return found;
  const json config = json::parse(config_text);
  add_declaration(path, config, "config.json", found);
  for (const auto& [key, member] : config.items()) {
    if (key == kConfigMember) continue;
    add_declaration(path, member, "config.json (" + printable(key) + ")", found);
  }
  return found;
}

std::string Declaration::names() const {
  std::string text;
  for (const ConventionSpec* spec : specs) {
    text += (text.empty() ? "" : " and ") + std::string(spec->info.name);
  }
  return text;
}

std::optional<Declaration> find_declaration(const Checkpoint& checkpoint) {
  const std::vector<Declaration> found = DeclarationList(checkpoint).gather();
  if (found.empty()) return std::nullopt;
  // A declaration of a part of the conventions, as of a single shard, may stand beside that of all.
  const Declaration& widest = *std::max_element(
      found.begin(), found.end(),
      [](const auto& a, const auto& b) { return a.specs.size() < b.specs.size(); });
  for (const Declaration& other : found) {
    const bool is_part = std::all_of(other.specs.begin(), other.specs.end(),
                                     [&](const auto* spec) { return widest.has(spec); });
    if (is_part) continue;
    throw_error(ErrorKind::kCorruptData,
                "{}: declarations contradict each other: {} says {} ({}), {} says {} ({}); remove "
                "the wrong one",
                printable(checkpoint.path()), widest.source, widest.names(), widest.method,
                other.source, other.names(), other.method);
  }
  return widest;
}

}  // namespace narrowfloat

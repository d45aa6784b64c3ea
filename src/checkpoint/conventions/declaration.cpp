// Gathers every declaration first and compares them then, so that a contradiction names both.
#include "checkpoint/conventions/declaration.h"

#include <algorithm>

#include "base/throw_error.h"
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
  std::string problem = member_problem(config, "", group_size);
  const auto groups = config.find("config_groups");
  if (groups == config.end() || groups->is_null()) return problem;
  if (!groups->is_object()) return "'config_groups' must be an object";
  for (const auto& [name, group] : groups->items()) {
    const std::string path = fmt::format("config_groups.{}.weights", printable(name, 40));
    const auto weights = group.is_object() ? group.find("weights") : group.end();
    if (!group.is_object() || weights == group.end() || weights->is_null()) continue;
    if (!weights->is_object()) return fmt::format("'{}' must be an object", path);
    const std::string type = string_member(*weights, "type");
    if (!type.empty() && type != "float") {
      return fmt::format("'{}.type' is '{}', but is 'float' in this convention", path,
                         printable(type, 40));
    }
    for (const FixedMember& fixed : {FixedMember{"num_bits", format.element_bits}, group_size}) {
      if (problem.empty()) problem = member_problem(*weights, path + ".", fixed);
    }
  }
  return problem;
}

Declaration read_declaration(const Checkpoint& checkpoint, const json& config,
                             const std::string& source) {
  Declaration declaration{.source = source, .method = describe(config)};
  for (const ConventionSpec* spec : all_convention_specs()) {
    if (!spec->is_declared_by(config)) continue;
    const std::string problem = weights_problem(config, *spec);
    if (!problem.empty()) {
      throw_error(ErrorKind::kCorruptData, "{}: {} declares {} ({}) and contradicts itself: {}",
                  printable(checkpoint.path()), source, spec->info.name, declaration.method,
                  problem);
    }
    declaration.spec = spec;
    return declaration;
  }
  throw_error(
      ErrorKind::kUnsupported,
      "{}: {}: quantization method '{}' cannot be read; readable are {} (and ModelOpt MXFP8)",
      printable(checkpoint.path()), source, declaration.method, convention_names());
}

class DeclarationList {
 public:
  explicit DeclarationList(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  std::vector<Declaration> gather() {
    read_config();
    read_modelopt_file();
    read_metadata();
    return std::move(found_);
  }

 private:
  // The top level, and one level down: multi-modal models nest the language model's config.
  void read_config() {
    if (checkpoint_.config_text().empty()) return;
    const json config = json::parse(checkpoint_.config_text());
    add(config, "config.json");
    for (const auto& [key, member] : config.items()) {
      if (key != kConfigMember) add(member, "config.json (" + printable(key) + ")");
    }
  }

  void add(const json& model_config, const std::string& source) {
    if (!model_config.is_object()) return;
    const auto found = model_config.find(kConfigMember);
    if (found == model_config.end() || !declares(*found)) return;
    Declaration declaration = read_declaration(checkpoint_, *found, source);
    // A member of the model's config, or of quantization_config.
    std::string experts = string_member(model_config, kExpertMember);
    if (experts.empty()) experts = string_member(*found, kExpertMember);
    if (declaration.spec == &deepseek_fp8() && experts == "fp4") {
      declaration.experts = &deepseek_mxfp4();
      declaration.method += fmt::format(", {} fp4", kExpertMember);
    }
    found_.push_back(std::move(declaration));
  }

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
      found_.push_back(read_declaration(checkpoint_, config, kModelOptFile));
    }
  }

  void read_metadata() {
    for (const SafetensorsReader& shard : checkpoint_.shards()) {
      const auto entry = shard.metadata().find(kConventionKey);
      if (entry == shard.metadata().end()) continue;
      const std::string source = printable(shard.path()) + " (__metadata__)";
      const ConventionSpec* spec = by_name(entry->second);
      if (spec == nullptr) {
        throw_error(ErrorKind::kUnsupported,
                    "{}: convention '{}' cannot be read; readable are {}; was the file written by "
                    "a newer version?",
                    source, printable(entry->second), convention_names());
      }
      found_.push_back({.source = source, .method = std::string(spec->info.name), .spec = spec});
    }
  }

  static const ConventionSpec* by_name(const std::string& name) {
    for (const ConventionSpec* spec : all_convention_specs()) {
      if (spec->info.name == name) return spec;
    }
    return nullptr;
  }

  const Checkpoint& checkpoint_;
  std::vector<Declaration> found_;
};

}  // namespace

std::optional<Declaration> find_declaration(const Checkpoint& checkpoint) {
  const std::vector<Declaration> found = DeclarationList(checkpoint).gather();
  if (found.empty()) return std::nullopt;
  for (const Declaration& other : found) {
    if (other.spec == found.front().spec) continue;
    throw_error(ErrorKind::kCorruptData,
                "{}: declarations contradict each other: {} says {} ({}), {} says {} ({}); remove "
                "the wrong one",
                printable(checkpoint.path()), found.front().source, found.front().spec->info.name,
                found.front().method, other.source, other.spec->info.name, other.method);
  }
  // A declaration of the model as a whole may stand beside one that knows of its experts.
  const auto of_experts =
      std::find_if(found.begin(), found.end(),
                   [](const Declaration& declaration) { return declaration.experts != nullptr; });
  return of_experts == found.end() ? found.front() : *of_experts;
}

}  // namespace narrowfloat

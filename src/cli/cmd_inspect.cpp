// narrowfloat inspect PATH: the tensors as a model sees them, how they are quantized, and where the
// bytes are. Reads headers only. A checkpoint whose quantization this version cannot read is still
// listed, tensor by tensor as stored, with exit code 4.
#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli_common/command_line.h"
#include "cli_common/output.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kInspectExamples = R"(Examples:
  narrowfloat inspect model-nvfp4
  narrowfloat inspect model-nvfp4 --tensor '*.experts.0.*' --csv
)";

struct InspectArguments {
  OutputArguments output;
  std::string path;
  std::vector<std::string> tensor_globs;  // Empty: all tensors.
};

struct Inspection {
  std::vector<LogicalTensor> tensors;  // Those that were asked for.
  std::string unsupported;             // Why the quantization was not recognised.
};

// "nvfp4-ct" for quantized tensors, "BF16" for plain ones.
std::string_view kind_of(const LogicalTensor& tensor) {
  return tensor.convention ? convention_info(*tensor.convention).name : name(tensor.dtype);
}

// Matches as the library matches --include and --exclude.
bool matches(const std::string& glob, const LogicalTensor& tensor) {
  return glob_matches(glob, tensor.name);
}

// Throws for a glob that matches nothing: it is a typing error more often than a question.
void keep_matching(std::vector<LogicalTensor>& tensors, const std::vector<std::string>& globs) {
  if (globs.empty()) return;
  for (const std::string& glob : globs) {
    if (std::any_of(tensors.begin(), tensors.end(),
                    [&](const LogicalTensor& tensor) { return matches(glob, tensor); })) {
      continue;
    }
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--tensor: '{}' matches no tensor; globs apply to whole names, as "
                            "'*.down_proj.weight'",
                            escaped(glob)));
  }
  std::erase_if(tensors, [&](const LogicalTensor& tensor) {
    return std::none_of(globs.begin(), globs.end(),
                        [&](const std::string& glob) { return matches(glob, tensor); });
  });
}

// Lists every stored tensor as a plain one, which can be done without knowing the quantization.
std::vector<LogicalTensor> stored_tensors(const Checkpoint& checkpoint) {
  std::vector<LogicalTensor> tensors;
  for (const CheckpointTensor& stored : checkpoint.tensors()) {
    LogicalTensor tensor;
    tensor.name = stored.info.name;
    tensor.shape = stored.info.shape;
    tensor.dtype = stored.info.dtype;
    tensor.parts = {stored.info.name};
    tensor.size_bytes = stored.info.size_bytes;
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

// Only an unknown method falls back to stored tensors; a checkpoint that contradicts itself is an
// error, because no listing of it would be right.
Inspection look_into(const Checkpoint& checkpoint, const std::vector<std::string>& globs) {
  Inspection inspection;
  try {
    inspection.tensors = recognise(checkpoint);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUnsupported) throw;
    inspection.unsupported = error.what();
    inspection.tensors = stored_tensors(checkpoint);
  }
  keep_matching(inspection.tensors, globs);
  return inspection;
}

// Returns what config.json or the file's metadata say about quantization, such as
// "compressed-tensors, nvfp4-pack-quantized"; empty if nothing. Other places are not looked at:
// they are the library's business, this is a heading for people.
std::string declared_method(const Checkpoint& checkpoint) {
  const Json config = Json::parse(checkpoint.config_text(), nullptr, false);
  std::string text;
  if (config.is_object() && config.contains("quantization_config")) {
    const Json& quantization = config["quantization_config"];
    for (const char* key : {"quant_method", "quant_algo", "format", "fmt"}) {
      const auto value = quantization.is_object() ? quantization.find(key) : quantization.end();
      if (value == quantization.end() || !value->is_string()) continue;
      text += (text.empty() ? "" : ", ") + value->get<std::string>();
    }
  }
  if (!text.empty()) return text;
  const auto& metadata = checkpoint.shards().front().metadata();
  const auto convention = metadata.find("narrowfloat.convention");
  return convention == metadata.end() ? "" : convention->second;
}

// Sums over the tensors of one kind.
struct KindTotals {
  int64_t tensors = 0;
  int64_t elements = 0;
  uint64_t size_bytes = 0;

  void add(const LogicalTensor& tensor) {
    ++tensors;
    elements += tensor.num_elements();
    size_bytes += tensor.size_bytes;
  }
  [[nodiscard]] double bits_per_weight() const {
    return elements == 0 ? 0 : 8 * static_cast<double>(size_bytes) / static_cast<double>(elements);
  }
};

struct TensorTotals {
  std::map<std::string_view, KindTotals> kinds;
  KindTotals all;
};

TensorTotals sum_up(const std::vector<LogicalTensor>& tensors) {
  TensorTotals totals;
  for (const LogicalTensor& tensor : tensors) {
    totals.kinds[kind_of(tensor)].add(tensor);
    totals.all.add(tensor);
  }
  return totals;
}

Json to_json(std::string_view kind, const KindTotals& totals) {
  return Json{{"kind", kind},
              {"tensors", totals.tensors},
              {"elements", totals.elements},
              {"size_bytes", totals.size_bytes},
              {"bits_per_weight", totals.bits_per_weight()}};
}

Json to_json(const LogicalTensor& tensor, const Checkpoint& checkpoint) {
  Json json{{"name", tensor.name},
            {"kind", kind_of(tensor)},
            {"quantized", tensor.convention.has_value()},
            {"shape", tensor.shape},
            {"size_bytes", tensor.size_bytes},
            {"bits_per_weight", json_number(tensor.bits_per_element())},
            {"parts", tensor.parts},
            {"stored", Json::array()}};
  for (const std::string& part : tensor.parts) {
    const TensorInfo& info = checkpoint.find(part)->info;
    json["stored"].push_back(
        Json{{"name", part}, {"dtype", name(info.dtype)}, {"shape", info.shape}});
  }
  if (tensor.convention) {
    json["format"] = stored_format(convention_info(*tensor.convention));
  }
  return json;
}

void print_document(const InspectArguments& arguments, const Checkpoint& checkpoint,
                    const Inspection& inspection) {
  const TensorTotals totals = sum_up(inspection.tensors);
  Json document = json_document("inspect");
  document["path"] = arguments.path;
  document["shards"] = Json::array();
  for (const SafetensorsReader& shard : checkpoint.shards()) {
    document["shards"].push_back(Json{{"path", shard.path()},
                                      {"size_bytes", shard.file_size()},
                                      {"tensors", shard.tensors().size()},
                                      {"metadata", shard.metadata()}});
  }
  document["total"] = to_json("all", totals.all);
  document["kinds"] = Json::array();
  for (const auto& [kind, sums] : totals.kinds) document["kinds"].push_back(to_json(kind, sums));
  const std::string declared = declared_method(checkpoint);
  document["declared"] = declared.empty() ? Json(nullptr) : Json(declared);
  document["warnings"] = checkpoint.warnings();
  document["unsupported"] =
      inspection.unsupported.empty() ? Json(nullptr) : Json(inspection.unsupported);
  print_json(document, "tensors", inspection.tensors.size(),
             [&](size_t i) { return to_json(inspection.tensors[i], checkpoint); });
}

// CSV has plain numbers and names of columns that carry the unit.
Table tensor_table(const Inspection& inspection, DataFormat data) {
  using enum Table::Align;
  Table table({{"kind", kLeft},
               {"shape", kRight},
               {data == DataFormat::kCsv ? "size_bytes" : "size", kRight},
               {data == DataFormat::kCsv ? "bits_per_weight" : "bits", kRight},
               {"tensor", kLeft}});
  for (const LogicalTensor& tensor : inspection.tensors) {
    table.add_row({std::string(kind_of(tensor)), format_shape(tensor.shape),
                   data == DataFormat::kCsv ? std::to_string(tensor.size_bytes)
                                            : format_bytes(tensor.size_bytes),
                   fmt::format("{:.3f}", tensor.bits_per_element()), escaped(tensor.name)},
                  tensor.convention ? Tone::kGood : Tone::kPlain);
  }
  return table;
}

// TensorTotals by kind. The size in the heading is that of the files, headers included; those in
// the table are of tensors.
std::string summary(const InspectArguments& arguments, const Checkpoint& checkpoint,
                    const Inspection& inspection, bool colored) {
  const TensorTotals totals = sum_up(inspection.tensors);
  uint64_t file_bytes = 0;
  for (const SafetensorsReader& shard : checkpoint.shards()) file_bytes += shard.file_size();
  using enum Table::Align;
  Table table({{"kind", kLeft},
               {"tensors", kRight},
               {"weights", kRight},
               {"size", kRight},
               {"bits per weight", kRight},
               {"description", kLeft}});
  const auto add = [&](std::string_view kind, const KindTotals& sums, std::string_view text) {
    table.add_row({std::string(kind), std::to_string(sums.tensors), std::to_string(sums.elements),
                   format_bytes(sums.size_bytes), fmt::format("{:.3f}", sums.bits_per_weight()),
                   std::string(text)});
  };
  for (const auto& [kind, sums] : totals.kinds) {
    const auto infos = all_conventions();
    const auto info = std::find_if(infos.begin(), infos.end(),
                                   [&, wanted = kind](const auto& i) { return i.name == wanted; });
    add(kind, sums, info == infos.end() ? "" : info->description);
  }
  add("all", totals.all, "");
  const size_t num_shards = checkpoint.shards().size();
  const std::string declared = declared_method(checkpoint);
  return fmt::format(
      "{}\ndeclared: {}\n{}",
      paint(fmt::format("{}: {} {}, {}", escaped(arguments.path), num_shards,
                        num_shards == 1 ? "file" : "shards", format_bytes(file_bytes)),
            Tone::kHeading, colored),
      declared.empty() ? "no quantization" : escaped(declared), table.to_text(colored));
}

void print_tables(const InspectArguments& arguments, const Checkpoint& checkpoint,
                  const Inspection& inspection) {
  const bool colored = is_colored(arguments.output.color);
  const std::string tensors = tensor_table(inspection, DataFormat::kTable).to_text(colored);
  write_stdout(tensors + "\n" + summary(arguments, checkpoint, inspection, colored));
}

ExitCode run_inspect(const InspectArguments& arguments) {
  const Checkpoint checkpoint(arguments.path);
  const Inspection inspection = look_into(checkpoint, arguments.tensor_globs);
  if (!arguments.output.is_quiet) {
    for (const std::string& warning : checkpoint.warnings()) warn(warning);
  }
  if (!inspection.unsupported.empty()) warn(inspection.unsupported);
  if (arguments.output.data == DataFormat::kJson) {
    print_document(arguments, checkpoint, inspection);
  } else if (arguments.output.data == DataFormat::kCsv) {
    write_stdout(tensor_table(inspection, DataFormat::kCsv).to_csv());
  } else if (!arguments.output.is_quiet) {
    print_tables(arguments, checkpoint, inspection);
  }
  return inspection.unsupported.empty() ? ExitCode::kDone : ExitCode::kUnsupported;
}

}  // namespace

void add_inspect(const Commands& commands) {
  CLI::App& command = add_command(
      commands, "inspect", "Show tensors, recognised quantization and sizes", kInspectExamples);
  InspectArguments& arguments = arguments_of(command, commands, run_inspect);
  add_path(command, "PATH", arguments.path, "A .safetensors file, or a directory with shards");
  add_globs(command, "--tensor", arguments.tensor_globs,
            "Only tensors with such a name; may be repeated");
  add_output(command, arguments.output, CsvSupport::kYes);
}

}  // namespace narrowfloat::cli

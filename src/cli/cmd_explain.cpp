// explain, moe explain and doctor: which implementation runs, who chose it, and why the others do
// not. explain asks about one operation; moe explain asks about a layer, with its token tile, and
// prints the plan of its runs; doctor says what belongs into a bug report: build, CPU, GPUs,
// environment variables, and for a typical matrix the choice of every operation. The exit code is 4
// where an operation that was asked for has no implementation.
#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli_common/command_line.h"
#include "cli_common/moe/layer_options.h"
#include "cli_common/output.h"
#include "narrowfloat/moe_tuning.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kExplainExamples = R"(Examples:
  narrowfloat explain quantize --format nvfp4 --shape 4096x4096
  narrowfloat explain dequantize --format mxfp8 --shape 128x2880 --dtype fp16 --json
)";
constexpr const char* kMoeExplainExamples = R"(Examples:
  narrowfloat moe explain --shape gpt-oss-20b --tokens 1,64
  narrowfloat moe explain --shape deepseek-v3 --device cuda --tuning h100.json --json
)";
constexpr const char* kDoctorExamples = R"(Examples:
  narrowfloat doctor --json > bug-report.json
)";

// Lists all of them, because a bug report has to say why the expected one did not run.
Json candidates_json(const Explanation& explanation) {
  Json candidates = Json::array();
  for (const Candidate& candidate : explanation.candidates) {
    candidates.push_back(Json{{"name", candidate.name},
                              {"supported", candidate.supported},
                              {"reason", candidate.reason}});
  }
  return candidates;
}

Json chosen_json(const Explanation& explanation) {
  return explanation.chosen.empty() ? Json(nullptr) : Json(explanation.chosen);
}

// ---- explain

struct ExplainArguments {
  OutputArguments output;
  std::string op;
  ExplainRequest request;
};

void print_document(const Explanation& explanation) {
  Json document = json_document("explain");
  document["op"] = explanation.op;
  document["problem"] = explanation.problem;
  document["chosen"] = chosen_json(explanation);
  document["candidates"] = candidates_json(explanation);
  print_json(document);
}

// Candidates are listed in the order in which the library asks them.
void print_table(const Explanation& explanation, bool colored) {
  Table table({{"implementation"}, {"verdict"}});
  for (const Candidate& candidate : explanation.candidates) {
    const bool is_chosen = candidate.name == explanation.chosen;
    table.add_row({candidate.name, is_chosen ? "runs" : candidate.reason},
                  is_chosen ? Tone::kGood : Tone::kPlain);
  }
  std::string text = fmt::format("{}: {}\n", explanation.op, explanation.problem);
  text += table.to_text(colored);
  if (explanation.chosen.empty()) text += paint("no implementation fits\n", Tone::kBad, colored);
  write_stdout(text);
}

ExitCode run_explain(const ExplainArguments& arguments) {
  const Explanation explanation = explain(arguments.op, arguments.request);
  if (arguments.output.data == DataFormat::kJson) {
    print_document(explanation);
  } else if (!arguments.output.is_quiet) {
    print_table(explanation, is_colored(arguments.output.color));
  }
  return explanation.chosen.empty() ? ExitCode::kUnsupported : ExitCode::kDone;
}

// ---- moe explain

struct MoeExplainArguments {
  OutputArguments output;
  LayerArguments layer;
  Device device;
  std::vector<int64_t> tokens = {1};
  std::optional<int32_t> token_tile;
  std::string tuning;  // A file; empty: the rule.
};

struct ExplainedLayer {
  MoeMode mode = MoeMode::kBf16;
  int64_t tokens = 0;
  int32_t token_tile = 0;
  std::vector<Explanation> stages;  // The choice of the token tile comes first.
  MoePlanInfo plan;
};

std::vector<ExplainedLayer> explain_layers(const MoeExplainArguments& arguments,
                                           const MoeShape& shape) {
  constexpr uint64_t kAnyMemory = uint64_t{1} << 62U;
  MoeTuning tuning;
  if (!arguments.tuning.empty()) tuning = MoeTuning::load(arguments.tuning);
  std::vector<std::string> notes;
  std::vector<ExplainedLayer> layers;
  for (const MoeMode mode : modes_of(arguments.layer, shape, notes)) {
    for (const int64_t tokens : arguments.tokens) {
      MoeConfig config = layer_config(shape, mode, arguments.layer.shard, tokens, kAnyMemory);
      config.token_tile = arguments.token_tile;
      const TokenTileChoice choice = choose_token_tile(config, tokens, arguments.device, tuning);
      config.token_tile = choice.token_tile;
      ExplainedLayer layer{mode,
                           tokens,
                           choice.token_tile,
                           {choice.explanation},
                           plan_moe(config, tokens, arguments.device)};
      for (Explanation& stage : explain_moe(config, tokens, arguments.device)) {
        layer.stages.push_back(std::move(stage));
      }
      layers.push_back(std::move(layer));
    }
  }
  return layers;
}

Json plan_json(const MoePlanInfo& plan) {
  Json stages = Json::array();
  for (const MoePlanInfo::Stage& stage : plan.stages) {
    const bool has_none = stage.implementation.empty();
    stages.push_back(Json{{"stage", stage.stage},
                          {"op", stage.op},
                          {"implementation", has_none ? Json(nullptr) : Json(stage.implementation)},
                          {"reads", stage.reads},
                          {"writes", stage.writes}});
  }
  Json buffers = Json::array();
  for (const MoePlanInfo::Buffer& buffer : plan.buffers) {
    buffers.push_back(
        Json{{"name", buffer.name}, {"offset", buffer.offset}, {"bytes", buffer.bytes}});
  }
  return Json{{"stages", stages}, {"buffers", buffers}, {"workspace_bytes", plan.workspace_bytes}};
}

void print_document(const MoeExplainArguments& arguments, const MoeShape& shape,
                    const std::vector<ExplainedLayer>& layers) {
  Json document = json_document("moe explain");
  document["device"] = to_string(arguments.device);
  document["shape"] = shape.name;
  document["rank"] = arguments.layer.shard.rank;
  document["ranks"] = arguments.layer.shard.num_ranks;
  document["cases"] = Json::array();
  for (const ExplainedLayer& layer : layers) {
    Json stages = Json::array();
    for (const Explanation& stage : layer.stages) {
      stages.push_back(Json{{"op", stage.op},
                            {"problem", stage.problem},
                            {"chosen", chosen_json(stage)},
                            {"candidates", candidates_json(stage)}});
    }
    document["cases"].push_back(Json{{"mode", name(layer.mode)},
                                     {"tokens", layer.tokens},
                                     {"token_tile", layer.token_tile},
                                     {"stages", stages},
                                     {"plan", plan_json(layer.plan)}});
  }
  print_json(document);
}

// Lists the stages in their order with the buffers that they use, then the place of each buffer in
// the workspace. Buffers without bytes are left out.
std::string plan_text(const MoePlanInfo& plan, bool colored) {
  Table buffers({{"buffer"}, {"offset", Table::Align::kRight}, {"bytes", Table::Align::kRight}});
  std::set<std::string> used;
  for (const MoePlanInfo::Buffer& buffer : plan.buffers) {
    if (buffer.bytes == 0) continue;
    used.insert(buffer.name);
    buffers.add_row({buffer.name, std::to_string(buffer.offset), std::to_string(buffer.bytes)});
  }
  const auto list_of = [&](const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& name : names) {
      if (used.contains(name)) text += (text.empty() ? "" : " ") + name;
    }
    return text.empty() ? "-" : text;
  };
  Table stages({{"plan"}, {"operation"}, {"implementation"}, {"reads"}, {"writes"}});
  for (const MoePlanInfo::Stage& stage : plan.stages) {
    stages.add_row({stage.stage, stage.op,
                    stage.implementation.empty() ? "-" : stage.implementation, list_of(stage.reads),
                    list_of(stage.writes)});
  }
  return fmt::format("{}\n{}workspace: {} bytes\n", stages.to_text(colored),
                     buffers.to_text(colored), plan.workspace_bytes);
}

// Candidates are listed in the order in which the layer asks them.
void print_tables(const MoeExplainArguments& arguments, const MoeShape& shape,
                  const std::vector<ExplainedLayer>& layers) {
  const bool colored = is_colored(arguments.output.color);
  for (const ExplainedLayer& layer : layers) {
    Table table({{"stage"}, {"implementation"}, {"verdict"}});
    for (const Explanation& stage : layer.stages) {
      for (const Candidate& candidate : stage.candidates) {
        const bool is_chosen = candidate.name == stage.chosen;
        table.add_row({stage.op, candidate.name, is_chosen ? "runs" : candidate.reason},
                      is_chosen ? Tone::kGood : Tone::kPlain);
      }
      if (stage.chosen.empty())
        table.add_row({stage.op, "-", "no implementation fits"}, Tone::kBad);
    }
    write_stdout(fmt::format("{} {}, {} tokens on {}: {} rows a tile\n", shape.name,
                             name(layer.mode), layer.tokens, to_string(arguments.device),
                             layer.token_tile));
    write_stdout(table.to_text(colored) + "\n" + plan_text(layer.plan, colored));
    if (&layer != &layers.back()) write_stdout("\n");
  }
}

bool is_complete(const ExplainedLayer& layer) {
  return std::none_of(layer.stages.begin(), layer.stages.end(),
                      [](const Explanation& stage) { return stage.chosen.empty(); });
}

ExitCode run_moe_explain(const MoeExplainArguments& arguments) {
  const MoeShape shape = parse_moe_shape(arguments.layer.shape);
  const std::vector<ExplainedLayer> layers = explain_layers(arguments, shape);
  if (arguments.output.data == DataFormat::kJson) {
    print_document(arguments, shape, layers);
  } else if (!arguments.output.is_quiet) {
    print_tables(arguments, shape, layers);
  }
  const bool all = std::all_of(layers.begin(), layers.end(), is_complete);
  return all ? ExitCode::kDone : ExitCode::kUnsupported;
}

// ---- doctor

struct DoctorArguments {
  OutputArguments output;
};

// Large enough for every implementation to be worth its while, and a multiple of every block.
constexpr int64_t kTypicalExtent = 4096;

// The implementation that an operation on a format would use on a device.
struct DoctorChoice {
  std::string_view op;
  std::string_view format;  // Empty for operations without formats.
  std::string device;
  Explanation explanation;
};

// The CPU, then every GPU that this build can see.
std::vector<Device> devices() {
  std::vector<Device> devices = {Device{}};
  const auto num_gpus = static_cast<int>(gpu_info().size());
  for (int i = 0; i < num_gpus; ++i) devices.push_back({DeviceType::kCuda, i});
  return devices;
}

// doctor is asked to find what keeps explain() from answering, such as a wrong NARROWFLOAT_FORCE:
// it becomes the answer.
Explanation explain_or_reason(std::string_view op, const ExplainRequest& request) {
  try {
    return explain(op, request);
  } catch (const Error& error) {
    Explanation explanation;
    explanation.op = op;
    explanation.candidates.push_back({.name = "error", .supported = false, .reason = error.what()});
    return explanation;
  }
}

std::vector<DoctorChoice> all_choices() {
  std::vector<DoctorChoice> choices;
  for (const Device device : devices()) {
    for (const std::string_view op : operations()) {
      ExplainRequest request{
          .scale_layout = {}, .rows = kTypicalExtent, .cols = kTypicalExtent, .device = device};
      if (!has_formats(op)) {
        choices.push_back({op, {}, to_string(device), explain_or_reason(op, request)});
        continue;
      }
      for (const FormatInfo& format : all_formats()) {
        request.format = format.id;
        choices.push_back({op, format.name, to_string(device), explain_or_reason(op, request)});
      }
    }
  }
  return choices;
}

Json to_json(const DoctorChoice& choice) {
  return Json{{"op", choice.op},
              {"format", choice.format.empty() ? Json(nullptr) : Json(choice.format)},
              {"device", choice.device},
              {"chosen", chosen_json(choice.explanation)},
              {"candidates", candidates_json(choice.explanation)}};
}

void print_doctor_document() {
  const BuildInfo build = build_info();
  const CpuInfo cpu = cpu_info();
  Json document = json_document("doctor");
  document["version"] = build.version;
  document["build"] = Json{{"compiler", build.compiler},
                           {"type", build.build_type},
                           {"cuda", build.cuda_enabled},
                           {"cuda_architectures", build.cuda_architectures}};
  document["cpu"] =
      Json{{"model", cpu.model}, {"logical_cores", cpu.logical_cores}, {"features", cpu.features}};
  document["gpus"] = Json::array();
  for (const GpuInfo& gpu : gpu_info()) {
    document["gpus"].push_back(Json{{"name", gpu.name},
                                    {"compute_capability", gpu.compute_capability},
                                    {"memory_bytes", gpu.memory_bytes}});
  }
  document["environment"] = environment_settings();
  document["implementations"] = Json::array();
  for (const DoctorChoice& choice : all_choices())
    document["implementations"].push_back(to_json(choice));
  print_json(document);
}

std::string or_none(const std::vector<std::string>& words, std::string_view separator) {
  return words.empty() ? "none" : escaped(fmt::format("{}", fmt::join(words, separator)));
}

std::string machine_text() {
  const BuildInfo build = build_info();
  const CpuInfo cpu = cpu_info();
  std::string text = fmt::format("narrowfloat  {}\n", build.version);
  text += fmt::format("build        {}, {}\n", build.build_type, build.compiler);
  const std::string architectures = or_none(build.cuda_architectures, ", ");
  text += fmt::format("CUDA         {}\n",
                      build.cuda_enabled ? "code for sm_" + architectures : "not in this build");
  text += fmt::format("CPU          {}, {} logical cores\n", cpu.model, cpu.logical_cores);
  text += fmt::format("features     {}\n", or_none(cpu.features, " "));
  std::vector<std::string> gpus;
  for (const GpuInfo& gpu : gpu_info()) {
    gpus.push_back(fmt::format("{} ({}, {})", gpu.name, gpu.compute_capability,
                               format_bytes(static_cast<uint64_t>(gpu.memory_bytes))));
  }
  text += fmt::format("GPUs         {}\n", or_none(gpus, "; "));
  text += fmt::format("environment  {}\n", or_none(environment_settings(), " "));
  return text;
}

// "name (reason); name (reason)" of the candidates that would not run.
std::string others_text(const Explanation& explanation) {
  std::string text;
  for (const Candidate& candidate : explanation.candidates) {
    if (candidate.name == explanation.chosen) continue;
    text += fmt::format("{}{} ({})", text.empty() ? "" : "; ", candidate.name,
                        escaped(candidate.reason));
  }
  return text;
}

// One row for all formats that get the same answer.
std::string choices_text(bool colored) {
  struct Group {
    DoctorChoice choice;
    std::vector<std::string_view> formats;
  };
  std::vector<Group> groups;
  std::map<std::string, size_t> group_of_answer;
  for (DoctorChoice& choice : all_choices()) {
    const std::string answer =
        fmt::format("{}|{}|{}|{}", choice.device, choice.op, choice.explanation.chosen,
                    others_text(choice.explanation));
    const auto [entry, is_new] = group_of_answer.try_emplace(answer, groups.size());
    if (is_new) groups.push_back({choice, {}});
    groups[entry->second].formats.push_back(choice.format);
  }
  Table table({{"device"}, {"operation"}, {"runs"}, {"formats"}, {"others"}});
  for (const Group& group : groups) {
    const Explanation& explanation = group.choice.explanation;
    const bool is_for_all =
        group.formats.size() == all_formats().size() || !has_formats(group.choice.op);
    table.add_row({group.choice.device, std::string(group.choice.op),
                   explanation.chosen.empty() ? "nothing" : explanation.chosen,
                   is_for_all ? "all" : fmt::format("{}", fmt::join(group.formats, " ")),
                   others_text(explanation)});
  }
  return fmt::format("What runs for {0}x{0} BF16, exact:\n{1}", kTypicalExtent,
                     table.to_text(colored));
}

ExitCode run_doctor(const DoctorArguments& arguments) {
  if (arguments.output.data == DataFormat::kJson) {
    print_doctor_document();
  } else if (!arguments.output.is_quiet) {
    write_stdout(machine_text() + "\n" + choices_text(is_colored(arguments.output.color)));
  }
  return ExitCode::kDone;
}

}  // namespace

void add_explain(const Commands& commands) {
  CLI::App& command =
      add_command(commands, "explain", "Show which implementation an operation would use, and why",
                  kExplainExamples);
  ExplainArguments& arguments = arguments_of(command, commands, run_explain);
  ExplainRequest& request = arguments.request;
  command.add_option("OP", arguments.op, fmt::format("One of {}", fmt::join(operations(), ", ")))
      ->required()
      ->option_text(" ");
  add_parsed_into(command, "--format", parse_format, request.format,
                  fmt::format("One of {}", format_list()))
      ->required()
      ->option_text("FORMAT REQUIRED");
  add_parsed(
      command, "--shape", parse_shape,
      [&request](MatrixShape shape) {
        request.rows = shape.rows;
        request.cols = shape.cols;
      },
      "Rows and columns")
      ->required()
      ->option_text("MxK REQUIRED");
  add_parsed_into(command, "--layout", parse_scale_layout, request.scale_layout,
                  "Scale layout; default that of the format")
      ->option_text("LAYOUT");
  add_parsed_into(command, "--math", parse_math_mode, request.math,
                  "Arithmetic: exact (default) or fast")
      ->option_text("MODE");
  add_parsed_into(command, "--dtype", parse_dtype_option, request.dtype,
                  "High-precision side: bf16 (default), fp16 or fp32")
      ->option_text("DTYPE");
  add_parsed_into(command, "--device", parse_device, request.device, "cpu (default) or cuda:N")
      ->option_text("DEVICE");
  add_output(command, arguments.output, CsvSupport::kNo);
}

void add_moe_explain(const Commands& commands) {
  CLI::App& command = add_command(
      commands, "explain", "Show the token tile, the implementations and the plan of a layer",
      kMoeExplainExamples);
  MoeExplainArguments& arguments = arguments_of(command, commands, run_moe_explain);
  add_layer(command, arguments.layer);
  add_tokens(command, arguments.tokens, "1");
  add_token_tile(command, arguments.token_tile);
  add_tuning(command, arguments.tuning);
  add_parsed_into(command, "--device", parse_device, arguments.device,
                  "cpu (default), cuda or cuda:N")
      ->option_text("DEVICE");
  add_output(command, arguments.output, CsvSupport::kNo);
}

void add_doctor(const Commands& commands) {
  CLI::App& command = add_command(commands, "doctor",
                                  "Show what this build and this machine can do", kDoctorExamples);
  DoctorArguments& arguments = arguments_of(command, commands, run_doctor);
  add_output(command, arguments.output, CsvSupport::kNo);
}

}  // namespace narrowfloat::cli

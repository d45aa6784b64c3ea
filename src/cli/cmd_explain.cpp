// explain and moe explain: which implementation runs, who chose it, and why the others do not.
// explain asks about one operation, or about an all-reduce on a number of ranks; moe explain asks
// about a layer, with its token tile, and prints the plan of its runs. The exit code is 4 where an
// operation that was asked for has no implementation.
#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/explanation_json.h"
#include "cli_common/allreduce_names.h"
#include "cli_common/command_line.h"
#include "cli_common/moe/layer_options.h"
#include "cli_common/output.h"
#include "narrowfloat/allreduce.h"
#include "narrowfloat/moe_tuning.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kExplainExamples = R"(Examples:
  narrowfloat explain quantize --format nvfp4 --shape 4096x4096
  narrowfloat explain dequantize --format mxfp8 --shape 128x2880 --dtype fp16 --json
  narrowfloat explain allreduce --ranks 4 --shape 64x7168 --pattern nvfp4 --device cuda
)";
constexpr std::string_view kAllReduce = "allreduce";
constexpr const char* kMoeExplainExamples = R"(Examples:
  narrowfloat moe explain --shape gpt-oss-20b --tokens 1,64
  narrowfloat moe explain --shape deepseek-v3 --device cuda --tuning h100.json --json
)";

// ---- explain

struct ExplainArguments {
  OutputArguments output;
  std::string op;
  ExplainRequest request;
  bool has_format = false;
  AllReduceExplainRequest allreduce;  // Fields that ExplainRequest lacks.
  bool has_allreduce_options = false;
};

Explanation explain_allreduce_of(const ExplainArguments& arguments) {
  const ExplainRequest& request = arguments.request;
  AllReduceExplainRequest allreduce = arguments.allreduce;
  allreduce.device = request.device;
  AllReduceProblem& problem = allreduce.problem;
  problem.tokens = request.rows;
  problem.hidden = request.cols;
  problem.element = request.dtype;
  if (request.scale_layout) problem.scale_layout = *request.scale_layout;
  if (problem.algorithm == AllReduceAlgorithm::kNccl) {
    problem.exactness = AllReduceExactness::kFast;
  }
  return explain_allreduce(allreduce);
}

Explanation explain_of(const ExplainArguments& arguments) {
  if (arguments.op == kAllReduce) return explain_allreduce_of(arguments);
  const auto refuse = [](std::string_view message) {
    throw Error(ErrorKind::kInvalidArgument, std::string(message));
  };
  if (arguments.has_allreduce_options) {
    refuse("--ranks, --pattern, --algorithm and --group are options of explain allreduce");
  }
  if (!arguments.has_format) refuse("--format is required");
  return explain(arguments.op, arguments.request);
}

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
  const Explanation explanation = explain_of(arguments);
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
  for (const MoeMode mode : modes_of(arguments.layer, shape, arguments.device, notes)) {
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

void add_allreduce_options(CLI::App& command, ExplainArguments& arguments) {
  AllReduceExplainRequest& request = arguments.allreduce;
  bool& is_given = arguments.has_allreduce_options;
  const auto add = [&](const std::string& flag, auto parse, auto& value, const std::string& help) {
    return add_parsed(
        command, flag, parse,
        [&value, &is_given](auto parsed) {
          value = parsed;
          is_given = true;
        },
        help);
  };
  const auto number = [](int64_t high) {
    return [high](const std::string& text) {
      return static_cast<int>(parse_count(text, 1, high, fmt::format("a number up to {}", high)));
    };
  };
  constexpr int64_t kMostRanks = 4096;
  constexpr int64_t kMostColumns = 256;
  add("--ranks", number(kMostRanks), request.ranks, "allreduce: ranks; default 2")
      ->option_text("N");
  add("--pattern", parse_allreduce_pattern, request.problem.pattern,
      fmt::format("allreduce: one of {}", allreduce_pattern_list()))
      ->option_text("PATTERN");
  add("--algorithm", parse_allreduce_algorithm, request.problem.algorithm,
      "allreduce: auto (default), oneshot, twoshot, nccl, nccl_exact or reference")
      ->option_text("NAME");
  add("--group", number(kMostColumns), request.problem.group,
      "allreduce of pattern fp8_group: columns with one scale")
      ->option_text("G");
}

}  // namespace

void add_explain(const Commands& commands) {
  CLI::App& command =
      add_command(commands, "explain", "Show which implementation an operation would use, and why",
                  kExplainExamples);
  ExplainArguments& arguments = arguments_of(command, commands, run_explain);
  ExplainRequest& request = arguments.request;
  std::vector<Choice<std::string>> choices;
  for (const std::string_view op : operations()) choices.push_back({op, std::string(op)});
  choices.push_back({kAllReduce, std::string(kAllReduce)});
  add_choice<std::string>(command, "OP", std::move(choices), arguments.op,
                          fmt::format("One of {}, {}", fmt::join(operations(), ", "), kAllReduce))
      ->required()
      ->option_text(" ");
  with_words(add_parsed(
                 command, "--format", in_any_case(parse_format),
                 [&arguments](FormatId format) {
                   arguments.request.format = format;
                   arguments.has_format = true;
                 },
                 fmt::format("Required but for {}; one of {}", kAllReduce, format_list()))
                 ->option_text("FORMAT"),
             format_list());
  add_parsed(
      command, "--shape", parse_shape,
      [&request](MatrixShape shape) {
        request.rows = shape.rows;
        request.cols = shape.cols;
      },
      "Rows and columns; allreduce: tokens and columns of a message")
      ->required()
      ->option_text("MxK REQUIRED");
  add_parsed_into(command, "--layout", in_any_case(parse_scale_layout), request.scale_layout,
                  "Scale layout; default that of the format")
      ->option_text("LAYOUT");
  add_parsed_into(command, "--math", in_any_case(parse_math_mode), request.math,
                  "Arithmetic: exact (default) or fast")
      ->option_text("MODE");
  add_parsed_into(command, "--dtype", parse_dtype_option, request.dtype,
                  "High-precision side: bf16 (default), fp16 or fp32")
      ->option_text("DTYPE");
  add_parsed_into(command, "--device", parse_device, request.device, "cpu (default) or cuda:N")
      ->option_text("DEVICE");
  add_allreduce_options(command, arguments);
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

}  // namespace narrowfloat::cli

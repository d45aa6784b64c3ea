// narrowfloat-bench ep-model: the predicted time of an expert-parallel layer on many GPUs. Nothing
// is measured; the inputs are in ep_model.json, each with its source.
#include <array>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "bench_cli/commands.h"
#include "bench_cli/ep_model.h"
#include "cli_common/command_line.h"
#include "cli_common/moe/layer_options.h"
#include "cli_common/output.h"
#include "narrowfloat/expert_parallel.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  narrowfloat-bench ep-model --gpu h100 --ranks 2,8,64 --tokens 1,16,128,1024
  narrowfloat-bench ep-model --gpu h200 --ranks 16 --tokens 128 --mode fp8_block --payload fp8_group
)";
constexpr int64_t kMaxRanks = 64;

struct EpModelArguments {
  OutputArguments output;
  std::string gpu = "h100";
  std::string shape = "deepseek-v3";
  std::string mode;
  std::string payload = "bf16";
  CombineOrder order = CombineOrder::kRank;
  std::vector<int64_t> ranks = {2, 4, 8, 16, 32, 64};
  std::vector<int64_t> tokens = {1, 16, 128, 1024};
};

struct EpCase {
  int64_t ranks = 0;
  int64_t tokens = 0;
  EpPrediction time;
};

struct Payload {
  const char* name;
  RowFormat format;
  double bytes_per_col;
  double bytes_per_row;
};
constexpr std::array kPayloads{
    Payload{"bf16", RowFormat::kBf16, 2.0, 0.0},
    Payload{"fp8_group", RowFormat::kFp8Group, 1 + 1.0 / 32, 0.0},
    Payload{"mxfp8", RowFormat::kMxfp8, 1 + 1.0 / 32, 0.0},
    Payload{"nvfp4_per_token", RowFormat::kNvfp4PerToken, 0.5 + 1.0 / 16, 4.0}};

// Rows travel in bf16, or as the layer reads them.
const Payload& find_payload(const std::string& text, const std::string& mode) {
  const RowFormat input = moe_mode_info(parse_moe_mode(mode)).input;
  std::string names;
  for (const Payload& payload : kPayloads) {
    if (payload.format != RowFormat::kBf16 && payload.format != input) continue;
    if (text == payload.name) return payload;
    names += names.empty() ? payload.name : fmt::format(" or {}", payload.name);
  }
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("--payload: got '{}', expected {} for --mode {}", text, names, mode));
}

double tokens_per_second(const EpCase& entry) {
  return static_cast<double>(entry.ranks * entry.tokens) / entry.time.total_us() * 1e6;
}

Table case_table(const std::vector<EpCase>& cases) {
  using enum Table::Align;
  Table table({{"ranks", kRight},
               {"tokens", kRight},
               {"experts", kRight},
               {"experts_hit", kRight},
               {"sent_to", kRight},
               {"dispatch_us", kRight},
               {"layer_us", kRight},
               {"combine_us", kRight},
               {"total_us", kRight},
               {"million_tokens_per_s", kRight}});
  for (const EpCase& entry : cases) {
    const EpPrediction& time = entry.time;
    table.add_row({std::to_string(entry.ranks), std::to_string(entry.tokens),
                   std::to_string(time.local_experts), fmt::format("{:.1f}", time.experts_hit),
                   fmt::format("{:.2f}", time.ranks_of_token),
                   fmt::format("{:.1f}", time.dispatch_us), fmt::format("{:.1f}", time.layer_us),
                   fmt::format("{:.1f}", time.combine_us), fmt::format("{:.1f}", time.total_us()),
                   fmt::format("{:.3f}", tokens_per_second(entry) * 1e-6)});
  }
  return table;
}

void print_document(const EpModelArguments& arguments, const EpModel& model, const Json& inputs,
                    const std::vector<EpCase>& cases) {
  const Json& gpu = inputs.at("gpus").at(arguments.gpu);
  Json document = json_document("ep-model");
  document["version"] = version();
  document["gpu"] = arguments.gpu;
  document["shape"] = model.model;
  document["mode"] = model.mode;
  document["payload"] = arguments.payload;
  document["order"] = name(arguments.order);
  document["host_link"] = gpu.at("host_link");
  document["network"] = gpu.at("network");
  document["quantize"] = gpu.at("quantize");
  document["token_sum"] = gpu.at("token_sum");
  document["cases"] = Json::array();
  for (const EpCase& entry : cases) {
    document["cases"].push_back(Json{{"ranks", entry.ranks},
                                     {"tokens", entry.tokens},
                                     {"local_experts", entry.time.local_experts},
                                     {"experts_hit", entry.time.experts_hit},
                                     {"ranks_of_token", entry.time.ranks_of_token},
                                     {"dispatch_us", entry.time.dispatch_us},
                                     {"layer_us", entry.time.layer_us},
                                     {"combine_us", entry.time.combine_us},
                                     {"total_us", entry.time.total_us()},
                                     {"tokens_per_second", tokens_per_second(entry)}});
  }
  print_json(document);
}

ExitCode run_ep_model(const EpModelArguments& arguments) {
  const Json inputs = Json::parse(ep_model_inputs());
  const EpModel model = find_ep_model(inputs, arguments.gpu, arguments.shape, arguments.mode);
  const auto hidden = static_cast<double>(model.hidden);
  const double routing = 8 * static_cast<double>(model.top_k);  // An id and a weight for each slot.
  const Payload& payload = find_payload(arguments.payload, model.mode);
  const EpRows rows{
      .dispatch_bytes = payload.bytes_per_col * hidden + payload.bytes_per_row + routing,
      .combine_bytes = 2 * hidden,
      .is_topk = arguments.order == CombineOrder::kTopK,
      .is_quantized = payload.format != RowFormat::kBf16};
  std::vector<EpCase> cases;
  for (const int64_t ranks : arguments.ranks) {
    for (const int64_t tokens : arguments.tokens) {
      cases.push_back({ranks, tokens, predict(model, ranks, tokens, rows)});
    }
  }
  switch (arguments.output.data) {
    case DataFormat::kJson:
      print_document(arguments, model, inputs, cases);
      break;
    case DataFormat::kCsv:
      write_stdout(case_table(cases).to_csv());
      break;
    case DataFormat::kTable:
      if (arguments.output.is_quiet) break;
      write_stdout(fmt::format(
          "predicted: {} in {} on {}, payload {}, order {}, uniform routing; tokens are those of a "
          "rank\n\n",
          model.model, model.mode, arguments.gpu, arguments.payload, name(arguments.order)));
      write_stdout(case_table(cases).to_text(is_colored(arguments.output.color)));
  }
  return ExitCode::kDone;
}

std::vector<int64_t> parse_ranks(const std::string& text) {
  std::vector<int64_t> ranks = parse_count_list(text, kMaxRanks, "numbers from 2 to 64");
  for (const int64_t count : ranks) {
    if (count < 2) {
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("got '{}', expected numbers from 2 to 64", text));
    }
  }
  return ranks;
}

}  // namespace

void add_ep_model(const Commands& commands) {
  CLI::App& command = add_command(
      commands, "ep-model", "Predict the time of an expert-parallel layer on many GPUs", kExamples);
  EpModelArguments& arguments = arguments_of(command, commands, run_ep_model);
  command.add_option("--gpu", arguments.gpu, "h100 or h200; default h100")->option_text("GPU");
  command.add_option("--shape", arguments.shape, "Default deepseek-v3; or gpt-oss-120b")
      ->option_text("MODEL");
  command.add_option("--mode", arguments.mode, "Default: the model's first of docs/parallel.md")
      ->option_text("MODE");
  command
      .add_option("--payload", arguments.payload,
                  "Default bf16; or what the mode reads: fp8_group, mxfp8 or nvfp4_per_token")
      ->option_text("PAYLOAD");
  add_parsed_into(command, "--order", parse_combine_order, arguments.order,
                  "Order of the sum: rank (default) or topk")
      ->option_text("ORDER");
  add_parsed_into(command, "--ranks", parse_ranks, arguments.ranks,
                  "Default 2,4,8,16,32,64; eight of them share a host")
      ->option_text("R,...");
  add_parsed_into(command, "--tokens", parse_token_list, arguments.tokens,
                  "Tokens of each rank; default 1,16,128,1024")
      ->option_text("T,...");
  add_output(command, arguments.output, CsvSupport::kYes);
}

}  // namespace narrowfloat::cli

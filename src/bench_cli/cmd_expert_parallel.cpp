// narrowfloat-bench experts: dispatch and combine between ranks, and a layer whose experts
// lie on them, each rank with as many tokens. The sums of dispatch and combine are compared in the
// same run; a wrong one is exit code 1.
#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "bench_cli/commands.h"
#include "bench_cli/expert_parallel_measure.h"
#include "cli_common/command_line.h"
#include "cli_common/moe/layer_options.h"
#include "cli_common/output.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kExpertParallelExamples = R"(Examples:
  narrowfloat-bench experts --ranks 4 --on gpus --shape deepseek-v3 --tokens 1,16,128,1024
  narrowfloat-bench experts --ranks 2 --on gpus --shape gpt-oss-120b --transport all_to_all --json
  narrowfloat-bench experts --ranks 2 --shape 256,128,8,2 --tokens 4
)";

struct ExpertArguments {
  OutputArguments output;
  ExpertSettings settings;
  std::string shape;
  std::optional<MoeMode> mode;  // The shape's own by default.
  std::vector<int64_t> tokens;
  std::string commit;
};

// bf16, and the format that the mode reads, where it can travel.
std::vector<RowFormat> payloads_of(MoeMode mode) {
  std::vector<RowFormat> payloads{RowFormat::kBf16};
  const RowFormat input = moe_mode_info(mode).input;
  if (input == RowFormat::kFp8Group || input == RowFormat::kMxfp8 ||
      input == RowFormat::kNvfp4PerToken) {
    payloads.push_back(input);
  }
  return payloads;
}

std::vector<ExpertRow> rows_of(const ExpertArguments& arguments) {
  std::vector<ExpertRow> rows;
  for (const int64_t tokens : arguments.tokens) {
    for (const RowFormat payload : payloads_of(arguments.settings.mode)) {
      for (const CombineOrder order : {CombineOrder::kRank, CombineOrder::kTopK}) {
        rows.push_back({tokens, payload, order});
      }
    }
  }
  return rows;
}

std::string measured_text(double us) {
  return us == 0 ? "-" : fmt::format("{:.{}f}", us, us < 100 ? 2 : 1);
}

nlohmann::ordered_json measured_json(double us) {
  return us == 0 ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(us);
}

void print_document(const ExpertArguments& arguments, const std::vector<ExpertRow>& rows,
                    const MeasuredExperts& measured) {
  const ExpertSettings& settings = arguments.settings;
  auto document = json_document("experts");
  document["version"] = version();
  document["commit"] = arguments.commit;
  document["on"] = settings.setup.uses_gpus() ? "gpus" : "cpu";
  document["ranks"] = settings.setup.ranks;
  document["one_gpu"] = settings.setup.is_one_gpu;
  document["machine"] = {{"name", measured.facts.machine},
                         {"driver", measured.facts.driver},
                         {"cuda_runtime", measured.facts.cuda_runtime}};
  document["nccl"] = measured.facts.nccl;
  document["shape"] = settings.shape.name;
  document["mode"] = name(settings.mode);
  document["cases"] = nlohmann::ordered_json::array();
  for (size_t i = 0; i < rows.size(); ++i) {
    const ExpertResult& result = measured.rows[i];
    document["cases"].push_back({{"tokens", rows[i].tokens},
                                 {"payload", name(rows[i].payload)},
                                 {"order", name(rows[i].order)},
                                 {"transport", name(result.transport)},
                                 {"exchange_us", result.exchange_us},
                                 {"layer_us", measured_json(result.layer_us)},
                                 {"nccl_all_reduce_us", measured_json(result.all_reduce_us)},
                                 {"rows_per_token", result.sent_rows},
                                 {"correct", !result.is_wrong},
                                 {"message", result.message}});
  }
  print_json(document);
}

void print_table(const ExpertArguments& arguments, const std::vector<ExpertRow>& rows,
                 const MeasuredExperts& measured) {
  using enum Table::Align;
  Table table({{"tokens", kRight},
               {"payload", kLeft},
               {"order", kLeft},
               {"transport", kLeft},
               {"exchange_us", kRight},
               {"layer_us", kRight},
               {"nccl_all_reduce_us", kRight},
               {"rows_per_token", kRight},
               {"result", kLeft}});
  for (size_t i = 0; i < rows.size(); ++i) {
    const ExpertResult& result = measured.rows[i];
    table.add_row({std::to_string(rows[i].tokens), std::string(name(rows[i].payload)),
                   std::string(name(rows[i].order)), std::string(name(result.transport)),
                   measured_text(result.exchange_us), measured_text(result.layer_us),
                   measured_text(result.all_reduce_us), fmt::format("{:.2f}", result.sent_rows),
                   result.is_wrong ? "WRONG" : "exact"},
                  result.is_wrong ? Tone::kBad : Tone::kPlain);
  }
  if (arguments.output.data == DataFormat::kCsv) return write_stdout(table.to_csv());
  if (arguments.output.is_quiet) return;
  write_stdout(fmt::format("{} ranks on {}, {} in {}\n\n", arguments.settings.setup.ranks,
                           escaped(measured.facts.machine), arguments.settings.shape.name,
                           name(arguments.settings.mode)));
  write_stdout(table.to_text(is_colored(arguments.output.color)));
}

ExitCode run_expert_parallel(const ExpertArguments& given) {
  turn_multicast_off();
  ExpertArguments arguments = given;
  ExpertSettings& settings = arguments.settings;
  settings.shape = parse_moe_shape(arguments.shape);
  settings.mode = arguments.mode.value_or(settings.shape.mode);
  const int32_t experts = settings.shape.routing.experts;
  if (settings.has_layer && experts % settings.setup.ranks != 0) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--ranks: a layer with {} experts has as many on each rank, which {} "
                            "ranks cannot have; --no-layer takes any number",
                            experts, settings.setup.ranks));
  }
  const int64_t most = *std::max_element(arguments.tokens.begin(), arguments.tokens.end());
  settings.setup.workspace.nccl_bytes = settings.setup.ranks * most * settings.shape.hidden * 2 +
                                        kMostAllReduceRanks * settings.shape.hidden * 4;
  const std::vector<ExpertRow> rows = rows_of(arguments);
  const MeasuredExperts measured = measure_experts(settings, rows);
  bool is_wrong = false;
  for (const ExpertResult& result : measured.rows) {
    if (!result.is_wrong) continue;
    is_wrong = true;
    warn(escaped(result.message));
  }
  if (arguments.output.data == DataFormat::kJson) {
    print_document(arguments, rows, measured);
  } else {
    print_table(arguments, rows, measured);
  }
  return is_wrong ? ExitCode::kFindings : ExitCode::kDone;
}

}  // namespace

void add_expert_parallel(const Commands& commands) {
  CLI::App& command = add_command(
      commands, "experts",
      "Time dispatch, combine and a layer whose experts lie on several ranks, checking sums",
      kExpertParallelExamples);
  ExpertArguments& arguments = arguments_of(command, commands, run_expert_parallel);
  RankSetup& setup = arguments.settings.setup;
  setup.place = RankPlace::kProcesses;
  command.add_option("--ranks", setup.ranks, "Ranks, 1 to 8")
      ->required()
      ->check(whole_number_in(1, kMostAllReduceRanks))
      ->option_text("N REQUIRED");
  add_choice<RankPlace>(command, "--on",
                        {{"cpu", RankPlace::kProcesses}, {"gpus", RankPlace::kGpus}}, setup.place,
                        "cpu (default), or gpus: a GPU for each rank; ranks are processes")
      ->option_text("WHERE");
  command.add_flag("--one-gpu", setup.is_one_gpu, "gpus: all processes share the first GPU")
      ->option_text(" ");
  command
      .add_option("--shape", arguments.shape,
                  "Shape of the layer: " + moe_shape_names() + ", or H,I,E,k")
      ->required()
      ->option_text("SHAPE REQUIRED");
  add_parsed(
      command, "--mode", parse_moe_mode, [&arguments](MoeMode mode) { arguments.mode = mode; },
      "Mode of the layer; its rows travel as bf16 and in its own format. Default: the shape's")
      ->option_text("MODE");
  add_parsed_into(command, "--transport", parse_expert_transport, arguments.settings.transport,
                  "auto (default), peer_memory, all_to_all (gpus alone: over NCCL) or all_gather")
      ->option_text("TRANSPORT");
  add_tokens(command, arguments.tokens, "1,16,128");
  command
      .add_flag_callback(
          "--no-layer", [&arguments] { arguments.settings.has_layer = false; },
          "Time dispatch and combine alone")
      ->option_text(" ");
  add_min_time(command, arguments.settings.measure.min_seconds);
  add_commit(command, arguments.commit);
  add_output(command, arguments.output, CsvSupport::kYes);
}

}  // namespace narrowfloat::cli

// narrowfloat-bench moe run: one layer of a checkpoint on real activations. How far its output is
// from an fp64 oracle, how its experts are used, how long it takes. For people, a table under a few
// lines about the layer; --csv is that table, --json has everything.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>

#include <fmt/format.h>

#include "bench_cli/activations.h"
#include "bench_cli/commands.h"
#include "cli_common/command_line.h"
#include "cli_common/moe/figures.h"
#include "cli_common/moe/layer_options.h"
#include "cli_common/moe/layer_runner.h"
#include "cli_common/output.h"
#include "narrowfloat/error.h"
#include "narrowfloat/runtime.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kRunExamples = R"(Examples:
  narrowfloat-bench moe run models/tiny-moe --layer 1 --mode all
  narrowfloat-bench moe run out --layer 0 --activations rows.safetensors --reference MODEL --json
)";

struct MoeRunArguments {
  OutputArguments output;
  Device device;
  std::string model;
  int64_t layer = 0;
  std::vector<MoeMode> modes;  // Empty: one that fits the stored weights.
  bool is_all_modes = false;   // All modes that the stored weights can be computed in.
  std::string activations;     // Empty: calibration/activations.safetensors of the model.
  std::string reference;       // The unquantized model, where `model` is quantized.
  std::string routing_target;  // File for the experts of every token; empty: none.
  bool is_forced = false;      // An existing file of that name is replaced.
  int64_t max_tokens = 0;      // 0: all.
  int num_threads = 0;
  double min_seconds = 0.5;
};

// The results of one mode.
struct LayerResult {
  MoeMode mode = MoeMode::kBf16;
  std::optional<Distance> to_unquantized;
  Distance to_same_inputs;
  CallTime time;
  LayerWork work;
};

struct LayerReport {
  explicit LayerReport(const Activations& inputs) : activations(inputs) {}

  MoeConfig config;
  std::string machine;
  std::string stored_format;
  const Activations& activations;
  bool has_static_scales = false;
  std::vector<int64_t> load;
  std::vector<LayerResult> modes;
};

// ---- report

Json distance_json(const Distance& distance) {
  return Json{{"rel", json_number(distance.rel)}, {"row", json_number(distance.row)}};
}

void print_document(const MoeRunArguments& arguments, const LayerReport& report) {
  const MoeConfig& config = report.config;
  const LoadSummary load = summarise(report.load);
  Json document = json_document("moe run");
  document["version"] = version();
  document["cpu"] = cpu_info().model;
  document["threads"] = num_threads();
  document["device"] = to_string(arguments.device);
  document["machine"] = report.machine;
  document["model"] = arguments.model;
  document["layer"] = arguments.layer;
  document["hidden"] = config.hidden;
  document["inter"] = config.inter;
  document["experts"] = config.routing.experts;
  document["top_k"] = config.routing.top_k;
  document["routing"] = name(config.routing.method);
  document["activation"] = name(config.activation.kind);
  document["stored_format"] = report.stored_format;
  document["activations"] = report.activations.path;
  document["stored_logits"] = report.activations.has_stored_logits;
  document["tokens"] = report.activations.tokens;
  document["load"] = Json{{"hit", load.num_hit},
                          {"min", load.smallest},
                          {"mean", load.mean},
                          {"max", load.largest},
                          {"tokens_per_expert", report.load}};
  document["modes"] = Json::array();
  for (const LayerResult& result : report.modes) {
    const double seconds = result.time.median_us * 1e-6;
    document["modes"].push_back(
        Json{{"mode", name(result.mode)},
             {"bits_per_weight", moe_mode_info(result.mode).bits_per_weight},
             {"error_to_unquantized",
              result.to_unquantized ? distance_json(*result.to_unquantized) : Json(nullptr)},
             {"error_to_fp64", distance_json(result.to_same_inputs)},
             {"runs", result.time.num_calls()},
             {"median_seconds", seconds},
             {"spread_percent", result.time.spread_percent()},
             {"weight_bytes", result.work.weight_bytes},
             {"flops", result.work.flops},
             {"weight_gb_per_second", billions_per_second(result.work.weight_bytes, seconds)},
             {"gflop_per_second", billions_per_second(result.work.flops, seconds)}});
  }
  print_json(document);
}

std::string distance_text(double value) { return fmt::format("{:.2e}", value); }

Table mode_table(const LayerReport& report) {
  using enum Table::Align;
  Table table({{"mode", kLeft},
               {"bits_per_weight", kRight},
               {"rel_unquantized", kRight},
               {"row_unquantized", kRight},
               {"rel_fp64", kRight},
               {"row_fp64", kRight},
               {"median_ms", kRight},
               {"spread_percent", kRight},
               {"weights_gb_per_s", kRight},
               {"gflop_per_s", kRight}});
  for (const LayerResult& result : report.modes) {
    const double seconds = result.time.median_us * 1e-6;
    const auto& exact = result.to_unquantized;
    table.add_row({std::string(name(result.mode)),
                   fmt::format("{:.3f}", moe_mode_info(result.mode).bits_per_weight),
                   exact ? distance_text(exact->rel) : "-", exact ? distance_text(exact->row) : "-",
                   distance_text(result.to_same_inputs.rel),
                   distance_text(result.to_same_inputs.row), fmt::format("{:.3f}", seconds * 1e3),
                   fmt::format("{:.0f}", result.time.spread_percent()),
                   fmt::format("{:.2f}", billions_per_second(result.work.weight_bytes, seconds)),
                   fmt::format("{:.2f}", billions_per_second(result.work.flops, seconds))});
  }
  return table;
}

void print_table(const MoeRunArguments& arguments, const LayerReport& report) {
  const MoeConfig& config = report.config;
  const LoadSummary load = summarise(report.load);
  std::string text = fmt::format(
      "layer        {} of {}: {} experts, top {}, hidden {}, intermediate {}, {}, {}\n",
      arguments.layer, escaped(arguments.model), config.routing.experts, config.routing.top_k,
      config.hidden, config.inter, name(config.activation.kind), name(config.routing.method));
  text += fmt::format("weights      stored as {}\n", report.stored_format);
  text += fmt::format("activations  {} tokens of {}, router logits {}\n", report.activations.tokens,
                      escaped(report.activations.path),
                      report.activations.has_stored_logits ? "from there" : "computed");
  if (report.has_static_scales) text += "calibration  static scales from these activations\n";
  text +=
      fmt::format("load         {} of {} experts hit; tokens per expert: {} to {}, mean {:.1f}\n",
                  load.num_hit, report.load.size(), load.smallest, load.largest, load.mean);
  text += fmt::format("             experts by tokens: {}\n", load_histogram(report.load));
  const bool is_on_cpu = arguments.device.type == DeviceType::kCpu;
  text += fmt::format(
      "machine      {}, {}\n\n",
      is_on_cpu ? fmt::format("{} threads", num_threads()) : to_string(arguments.device),
      report.machine);
  text += mode_table(report).to_text(is_colored(arguments.output.color));
  text += "\nrel, row: relative error of all rows and of the worst one, against fp64 on ";
  text += "the unquantized weights\nand against fp64 on the same quantized weights and inputs.\n";
  if (!report.modes.empty() && !report.modes.front().to_unquantized) {
    text += "unquantized: not available; name the original model with --reference\n";
  }
  write_stdout(text);
}

void print_report(const MoeRunArguments& arguments, const LayerReport& report) {
  if (arguments.output.data == DataFormat::kJson) {
    print_document(arguments, report);
  } else if (arguments.output.data == DataFormat::kCsv) {
    write_stdout(mode_table(report).to_csv());
  } else if (!arguments.output.is_quiet) {
    print_table(arguments, report);
  }
}

// ---- runs

// The inputs that all modes have in common.
struct Setting {
  explicit Setting(const Activations& inputs) : activations(inputs), rows(to_bf16(inputs.rows)) {}

  const Activations& activations;
  std::vector<uint16_t> rows;               // The same rows as bf16.
  std::optional<std::vector<float>> exact;  // The fp64 oracle on unquantized weights.
  LayerMaxima maxima;                       // Set where a mode has static scales.
};

Routing routing_of(const Activations& activations, const LoadedMoe& layer) {
  Routing routing;
  routing.logits = matrix_view(activations.logits, layer.config().routing.experts);
  routing.bias = layer.router_bias();
  return routing;
}

// Rounds nothing but the result: fp64 sums over the weights as they are, fp32 rows.
std::vector<float> unquantized_output(const LoadedMoe& plain, const Activations& activations) {
  MoeConfig config = plain.config();
  config.slot_dtype = DType::kF32;
  config.out_dtype = DType::kF32;
  return run_reference(
      plain.weights(), config, {.accumulation = Accumulation::kFp64, .fp32_rows = true},
      matrix_view(activations.rows, config.hidden), routing_of(activations, plain));
}

LoadedMoe load_plain(const std::string& path, int64_t layer) {
  LoadMoeOptions options;
  options.mode = MoeMode::kBf16;
  return {Checkpoint(path), layer, options};
}

// The output on the unquantized weights; empty where they are not known.
std::optional<std::vector<float>> exact_output(const MoeRunArguments& arguments,
                                               const LoadedMoe& stored,
                                               const Activations& activations) {
  if (arguments.reference.empty() && stored.stored_format() != WeightFormat::kBf16) {
    return std::nullopt;
  }
  const LoadedMoe plain = load_plain(
      arguments.reference.empty() ? arguments.model : arguments.reference, arguments.layer);
  const MoeConfig& config = plain.config();
  if (config.hidden != stored.config().hidden ||
      config.routing.experts != stored.config().routing.experts) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--reference {}: its layer has {} experts and hidden size {}, that of "
                            "{} has {} and {}",
                            printable(arguments.reference), config.routing.experts, config.hidden,
                            printable(arguments.model), stored.config().routing.experts,
                            stored.config().hidden));
  }
  return unquantized_output(plain, activations);
}

bool fits(const MoeModeInfo& mode, const LoadedMoe& stored) {
  const MoeConfig& config = stored.config();
  const bool has_weights =
      stored.stored_format() == WeightFormat::kBf16 || stored.stored_format() == mode.weights;
  return has_weights && config.hidden % mode.multiple == 0 && config.inter % mode.multiple == 0;
}

// Returns each mode once, in the order of the table. A named mode that does not fit stays: loading
// says why.
std::vector<MoeMode> modes_of(const MoeRunArguments& arguments, const LoadedMoe& stored) {
  const std::vector<MoeMode>& named = arguments.modes;
  if (named.empty() && !arguments.is_all_modes) return {stored.config().mode};
  std::vector<MoeMode> modes;
  for (const MoeModeInfo& info : all_moe_modes()) {
    const bool is_named = std::find(named.begin(), named.end(), info.id) != named.end();
    const bool is_here = arguments.device.type == DeviceType::kCpu || !info.is_on_cpu_alone;
    if (is_named || (arguments.is_all_modes && is_here && fits(info, stored))) {
      modes.push_back(info.id);
    }
  }
  return modes;
}

// The files that are read, under whatever path, are never written.
void check_routing_target(const MoeRunArguments& arguments, const Checkpoint& checkpoint,
                          const std::string& activations) {
  if (arguments.routing_target.empty()) return;
  check_output_file("--routing-out", arguments.routing_target, arguments.is_forced);
  std::vector<std::string> inputs = {activations};
  for (const SafetensorsReader& shard : checkpoint.shards()) inputs.push_back(shard.path());
  if (!arguments.reference.empty()) {
    for (const SafetensorsReader& shard : Checkpoint(arguments.reference).shards()) {
      inputs.push_back(shard.path());
    }
  }
  for (const std::string& input : inputs) {
    std::error_code error;
    if (!std::filesystem::equivalent(input, arguments.routing_target, error)) continue;
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("--routing-out {}: is read as {}; name another file",
                            printable(arguments.routing_target), printable(input)));
  }
}

// Writes ids [T, k] as `moe bench --routing` reads them.
void write_routing(const MoeRunArguments& arguments, std::span<const int32_t> ids, int64_t tokens) {
  if (arguments.routing_target.empty()) return;
  const std::string name = fmt::format("layers.{}.topk_ids", arguments.layer);
  const int64_t top_k = static_cast<int64_t>(ids.size()) / tokens;
  SafetensorsWriter writer(arguments.routing_target, {{name, DType::kI32, {tokens, top_k}}}, {},
                           {.replace = arguments.is_forced});
  writer.write(name, 0, std::as_bytes(ids));
  writer.commit();
}

// `ids` gets the experts of every token, which all modes have in common.
LayerResult run_mode(const MoeRunArguments& arguments, const Checkpoint& checkpoint,
                     const Setting& setting, MoeMode mode, Machine& machine,
                     std::vector<int32_t>& ids) {
  LoadMoeOptions options;
  options.mode = mode;
  if (has_static_scales(mode)) {
    options.input_amax = setting.maxima.input;
    options.inter_amax = setting.maxima.inter;
  }
  const LoadedMoe layer(checkpoint, arguments.layer, options);
  const Activations& activations = setting.activations;
  const TensorView rows = matrix_view(setting.rows, layer.config().hidden);
  const Routing routing = routing_of(activations, layer);
  LayerRunner runner(machine, layer.weights(), layer.config());
  runner.load(rows, routing, activations.tokens);
  LayerResult result;
  result.mode = mode;
  result.time = runner.time_runs({{0, activations.tokens}}, arguments.min_seconds);
  const std::vector<float> output = runner.output();
  ids = runner.ids();
  const LoadSummary summary = summarise(expert_load(ids, layer.config()));
  result.work = work_of(layer.config(), static_cast<double>(summary.num_hit),
                        static_cast<double>(summary.num_slots), activations.tokens);

  const std::vector<float> expected = run_reference(
      layer.weights(), layer.config(), {.accumulation = Accumulation::kFp64}, rows, routing);
  result.to_same_inputs = distance(output, expected, layer.config().hidden);
  if (setting.exact) {
    result.to_unquantized = distance(output, *setting.exact, layer.config().hidden);
  }
  return result;
}

std::string activations_path(const MoeRunArguments& arguments) {
  if (!arguments.activations.empty()) return arguments.activations;
  // A quantized model has the inputs of its original.
  for (const std::string& directory : {arguments.model, arguments.reference}) {
    if (directory.empty()) continue;
    if (const auto path = default_activations(directory)) return *path;
  }
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("{}: there is no calibration/activations.safetensors; name a file with "
                          "the layer's inputs with --activations",
                          printable(arguments.model)));
}

ExitCode run_moe_run(const MoeRunArguments& arguments) {
  set_num_threads(arguments.num_threads);
  const Checkpoint checkpoint(arguments.model);
  const std::string path = activations_path(arguments);
  check_routing_target(arguments, checkpoint, path);
  const LoadedMoe stored(checkpoint, arguments.layer);
  const Activations activations =
      read_activations(path, arguments.layer, stored, arguments.max_tokens);
  if (activations.tokens == 0) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: there are no rows in it", printable(path)));
  }
  const std::vector<MoeMode> modes = modes_of(arguments, stored);
  const std::unique_ptr<Machine> machine = open_machine(arguments.device);
  Setting setting(activations);
  setting.exact = exact_output(arguments, stored, activations);
  LayerReport report(activations);
  report.machine = machine->facts().name;
  report.config = stored.config();
  report.stored_format = name(stored.stored_format());
  report.has_static_scales = std::any_of(modes.begin(), modes.end(), has_static_scales);
  // Stored weights that have no mode with bf16 rows have none with static scales either,
  // and loading says so.
  if (report.has_static_scales && moe_mode_info(stored.config().mode).input == RowFormat::kBf16) {
    setting.maxima = measure_maxima(stored, activations.rows, activations.logits);
    require_usable(setting.maxima, arguments.layer, path);
  }
  std::vector<int32_t> ids;
  for (const MoeMode mode : modes) {
    report.modes.push_back(run_mode(arguments, checkpoint, setting, mode, *machine, ids));
  }
  report.load = expert_load(ids, report.config);
  write_routing(arguments, ids, activations.tokens);
  print_report(arguments, report);
  return ExitCode::kDone;
}

}  // namespace

void add_moe_run(const Commands& commands) {
  CLI::App& command = add_command(
      commands, "run", "Run a layer of a checkpoint on real activations: error, load, time",
      kRunExamples);
  MoeRunArguments& arguments = arguments_of(command, commands, run_moe_run);
  add_path(command, "DIR", arguments.model, "Checkpoint with experts, plain or quantized");
  command.add_option("--layer", arguments.layer, "Number of the layer")
      ->required()
      ->option_text("L REQUIRED")
      ->check(whole_number_in(0, int64_t{1} << 31));
  add_modes(command, arguments.modes, arguments.is_all_modes,
            fmt::format("May be repeated; all, or of {}. Default: what fits the stored weights; "
                        "plain weights are quantized to the mode's format",
                        mode_list()));
  command
      .add_option("--activations", arguments.activations,
                  "safetensors file with layers.L.hidden_states (or hidden_states) and, if known, "
                  "layers.L.router_logits; default DIR/calibration/activations.safetensors")
      ->option_text("FILE");
  command
      .add_option("--reference", arguments.reference,
                  "The unquantized model, to measure the error of a quantized one")
      ->option_text("DIR");
  command
      .add_option("--routing-out", arguments.routing_target,
                  "File for the experts of every token, for moe bench --routing")
      ->option_text("FILE");
  command.add_flag("--force", arguments.is_forced, "Replace FILE")->option_text(" ");
  command.add_option("--tokens", arguments.max_tokens, "The first N rows of the file; default all")
      ->option_text("N")
      ->check(whole_number_in(1, kMaxTokens));
  add_checked_device(command, arguments.device);
  add_threads(command, arguments.num_threads);
  add_min_time(command, arguments.min_seconds);
  add_output(command, arguments.output, CsvSupport::kYes);
}

}  // namespace narrowfloat::cli

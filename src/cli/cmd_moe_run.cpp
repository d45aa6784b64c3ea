// narrowfloat moe run: one layer of a checkpoint on real activations. How far its output is from an
// fp64 oracle, how its experts are used, how long it takes.
#include <algorithm>
#include <span>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/float_tensors.h"
#include "cli/moe/activations.h"
#include "cli/moe/calibration.h"
#include "cli/moe/gpu_layer.h"
#include "cli/moe/layer_report.h"
#include "cli/moe/layer_runner.h"
#include "narrowfloat/error.h"
#include "narrowfloat/runtime.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat::cli {
namespace {

// What all modes have in common.
struct Setting {
  explicit Setting(const Activations& inputs) : activations(inputs), rows(to_bf16(inputs.rows)) {}

  const Activations& activations;
  std::vector<uint16_t> rows;               // As bf16.
  std::optional<std::vector<float>> exact;  // The fp64 oracle on unquantized weights.
  LayerMaxima maxima;                       // Where a mode has static scales.
  Machine* gpu = nullptr;                   // Null: on the CPU.
};

Routing routing_of(const Activations& activations, const LoadedMoe& layer) {
  Routing routing;
  routing.logits = matrix_view(activations.logits, layer.config().routing.experts);
  routing.bias = layer.router_bias();
  return routing;
}

// Nothing is rounded but the result: fp64 sums over the weights as they are, fp32 rows.
std::vector<float> unquantized_output(const LoadedMoe& plain, const Activations& activations) {
  MoeConfig config = plain.config();
  config.accumulation = Accumulation::kFp64;
  config.fp32_rows = true;
  config.slot_dtype = DType::kF32;
  config.out_dtype = DType::kF32;
  LayerRunner runner(plain.weights(), config, activations.tokens);
  runner.run(matrix_view(activations.rows, config.hidden), routing_of(activations, plain));
  return runner.output();
}

LoadedMoe load_plain(const std::string& path, int64_t layer) {
  LoadMoeOptions options;
  options.mode = MoeMode::kBf16;
  return {Checkpoint(path), layer, options};
}

// Empty where the unquantized weights are not known.
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

// In the order of the table, each once. A named mode that does not fit stays: loading says why.
std::vector<MoeMode> modes_of(const MoeRunArguments& arguments, const LoadedMoe& stored) {
  const std::vector<MoeMode>& named = arguments.modes;
  if (named.empty() && !arguments.is_all_modes) return {stored.config().mode};
  std::vector<MoeMode> modes;
  for (const MoeModeInfo& info : all_moe_modes()) {
    const bool is_named = std::find(named.begin(), named.end(), info.id) != named.end();
    if (is_named || (arguments.is_all_modes && fits(info, stored))) modes.push_back(info.id);
  }
  return modes;
}

// Of a run: ids [T, k], as `moe bench --routing` reads them.
void write_routing(const MoeRunArguments& arguments, std::span<const int32_t> ids, int64_t tokens) {
  if (arguments.routing_target.empty()) return;
  const std::string name = fmt::format("layers.{}.topk_ids", arguments.layer);
  const int64_t top_k = static_cast<int64_t>(ids.size()) / tokens;
  SafetensorsWriter writer(arguments.routing_target, {{name, DType::kI32, {tokens, top_k}}}, {});
  writer.write(name, 0, std::as_bytes(ids));
  writer.commit();
}

LayerResult run_mode(const MoeRunArguments& arguments, const Checkpoint& checkpoint,
                     const Setting& setting, MoeMode mode, std::vector<int64_t>& load) {
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
  LayerResult result;
  result.mode = mode;
  std::vector<float> output;
  if (setting.gpu != nullptr) {
    GpuLayer runner(*setting.gpu, layer.weights(), layer.config());
    runner.load(rows, routing, activations.tokens);
    result.timing = runner.time_runs({{0, activations.tokens}}, arguments.min_seconds);
    output = runner.output();
    const std::vector<int32_t> ids = runner.ids();
    load = expert_load(ids, layer.config());
    write_routing(arguments, ids, activations.tokens);
  } else {
    LayerRunner runner(layer.weights(), layer.config(), activations.tokens);
    result.timing = time_runs([&] { runner.run(rows, routing); }, arguments.min_seconds);
    output = runner.output();
    load = expert_load(runner.ids(), layer.config());
    write_routing(arguments, runner.ids(), activations.tokens);
  }
  const LoadSummary summary = summarise(load);
  result.work = work_of(layer.config(), static_cast<double>(summary.num_hit),
                        static_cast<double>(summary.num_slots), activations.tokens);

  MoeConfig oracle_config = layer.config();
  oracle_config.accumulation = Accumulation::kFp64;
  LayerRunner oracle(layer.weights(), oracle_config, activations.tokens);
  oracle.run(rows, routing);
  result.to_same_inputs = distance(output, oracle.output(), layer.config().hidden);
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

}  // namespace

ExitCode run(const MoeRunArguments& arguments) {
  set_num_threads(arguments.num_threads);
  const std::string path = activations_path(arguments);
  const Checkpoint checkpoint(arguments.model);
  const LoadedMoe stored(checkpoint, arguments.layer);
  const Activations activations =
      read_activations(path, arguments.layer, stored, arguments.max_tokens);
  if (activations.tokens == 0) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: there are no rows in it", printable(path)));
  }
  const std::vector<MoeMode> modes = modes_of(arguments, stored);
  const std::unique_ptr<Machine> gpu = open_layer_machine(arguments.device);
  Setting setting(activations);
  setting.gpu = gpu.get();
  setting.exact = exact_output(arguments, stored, activations);
  LayerReport report(activations);
  report.machine = gpu == nullptr ? cpu_info().model : gpu->facts().name;
  report.config = stored.config();
  report.stored_format = name(stored.stored_format());
  report.has_static_scales = std::any_of(modes.begin(), modes.end(), has_static_scales);
  // Where the stored weights have no mode with bf16 rows they have none with static scales either,
  // and loading says so.
  if (report.has_static_scales && moe_mode_info(stored.config().mode).input == RowFormat::kBf16) {
    setting.maxima = measure_maxima(stored, activations.rows, activations.logits);
    require_usable(setting.maxima, arguments.layer, path);
  }
  for (const MoeMode mode : modes) {
    report.modes.push_back(run_mode(arguments, checkpoint, setting, mode, report.load));
  }
  print_report(arguments, report);
  return ExitCode::kDone;
}

}  // namespace narrowfloat::cli

// narrowfloat-bench eval: bits per byte of a small model on a text, with its experts in every mode.
// The rest of the model is computed in fp32 (text_model.h). Rows go into the experts as bf16 in
// every mode, as in a model that is served, and come out as fp32 into the fp32 residual stream:
// what differs between modes is the mode.
#if defined(__linux__)
#include <malloc.h>
#endif

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <system_error>

#include <fmt/format.h>

#include "bench_cli/activations.h"
#include "bench_cli/commands.h"
#include "bench_cli/text_model.h"
#include "cli_common/command_line.h"
#include "cli_common/moe/layer_options.h"
#include "cli_common/moe/layer_runner.h"
#include "cli_common/output.h"
#include "narrowfloat/error.h"
#include "narrowfloat/moe_checkpoint.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kEvalExamples = R"(Examples:
  narrowfloat-bench eval models/tiny-moe
  narrowfloat-bench eval models/tiny-moe --bytes all --mode nvfp4_bf16 --mode mxfp4_mxfp8 --json
)";
constexpr std::string_view kAll = "all";

struct EvalArguments {
  OutputArguments output;
  std::string model;
  std::string text;  // Empty: calibration/heldout.txt of the model.
  std::vector<MoeMode> modes;
  bool has_fp32 = false;
  bool is_all_modes = false;   // The same holds where no mode is named.
  uint64_t num_bytes = 32768;  // The first bytes of the text; 0: all.
  bool fast_sums = false;
  int num_threads = 0;
};

// A row of the table: a mode of the layer, or (without one) everything in fp32.
using EvalMode = std::optional<MoeMode>;

std::string eval_mode_name(EvalMode mode) { return mode ? std::string(name(*mode)) : "fp32"; }

double bits_per_weight(EvalMode mode) {
  return moe_mode_info(mode.value_or(MoeMode::kBf16)).bits_per_weight;
}

// ---- the experts of all layers of a model in one mode

LoadMoeOptions load_options(EvalMode mode, std::span<const LayerMaxima> maxima, size_t layer) {
  LoadMoeOptions options;
  options.mode = mode.value_or(MoeMode::kBf16);
  if (has_static_scales(*options.mode)) {
    options.input_amax = maxima[layer].input;
    options.inter_amax = maxima[layer].inter;
  }
  return options;
}

MoeConfig run_config(const LoadedMoe& loaded, EvalMode mode, bool fast_sums) {
  MoeConfig config = loaded.config();
  config.out_dtype = DType::kF32;
  config.fast_sums = fast_sums;
  if (!mode) config.slot_dtype = DType::kF32;
  return config;
}

MoeLayer prepare_layer(const LoadedMoe& loaded, EvalMode mode, bool fast_sums) {
  const MoeConfig config = run_config(loaded, mode, fast_sums);
  return mode ? MoeLayer::prepare(loaded.weights(), config)
              : MoeLayer::prepare_reference(loaded.weights(), config, {.fp32_rows = true});
}

LoadedMoe load_layer(const Checkpoint& checkpoint, const ModelConfig& model, int64_t layer,
                     const LoadMoeOptions& options) {
  LoadedMoe loaded(checkpoint, layer, options);
  if (loaded.config().hidden != model.hidden) {
    throw Error(
        ErrorKind::kCorruptData,
        fmt::format("{}: the experts of layer {} have hidden size {}, config.json says {}",
                    printable(checkpoint.path()), layer, loaded.config().hidden, model.hidden));
  }
  return loaded;
}

class ModelExperts {
 public:
  // `maxima` are those of every layer for modes with static scales; otherwise it may be empty.
  ModelExperts(const Checkpoint& checkpoint, const ModelConfig& model, EvalMode mode,
               std::span<const LayerMaxima> maxima, bool fast_sums);

  // Adds the experts' output for `rows` to `residual`: an ExpertFunction.
  void add_output(int64_t layer, std::span<const float> rows, std::span<float> residual);

 private:
  std::unique_ptr<Machine> host_ = open_host();  // The layers run one after another in its memory.
  struct Layer {
    LoadedMoe loaded;
    LayerRunner runner;
  };
  std::vector<Layer> layers_;
  bool takes_fp32_rows_;
};

ModelExperts::ModelExperts(const Checkpoint& checkpoint, const ModelConfig& model, EvalMode mode,
                           std::span<const LayerMaxima> maxima, bool fast_sums)
    : takes_fp32_rows_(!mode) {
  for (int64_t l = 0; l < model.layers; ++l) {
    LoadedMoe loaded = load_layer(checkpoint, model, l, load_options(mode, maxima, layers_.size()));
    LayerRunner runner(*host_, prepare_layer(loaded, mode, fast_sums));
    layers_.push_back({std::move(loaded), std::move(runner)});
  }
}

void ModelExperts::add_output(int64_t layer, std::span<const float> rows,
                              std::span<float> residual) {
  auto& [loaded, runner] = layers_[static_cast<size_t>(layer)];
  const MoeConfig& config = runner.config();
  const std::vector<float> logits = router_logits(loaded, rows);
  Routing routing;
  routing.logits = matrix_view(logits, config.routing.experts);
  routing.bias = loaded.router_bias();
  const std::vector<uint16_t> rounded = to_bf16(rows);
  const int64_t tokens = static_cast<int64_t>(rows.size()) / config.hidden;
  runner.load(
      takes_fp32_rows_ ? matrix_view(rows, config.hidden) : matrix_view(rounded, config.hidden),
      routing, tokens);
  runner.run({0, tokens});
  const std::vector<float> output = runner.output();
  for (size_t i = 0; i < output.size(); ++i) residual[i] += output[i];
}

// The static scales that some modes need.
struct ModelMaxima {
  std::vector<LayerMaxima> layers;
  std::string source;  // The inputs that they were measured on.
};

// Measures on DIR/calibration/activations.safetensors, or (without that file) in a pass over
// `window`.
ModelMaxima model_maxima(const Checkpoint& checkpoint, const TextModel& model, Window window) {
  ModelMaxima maxima;
  const std::optional<std::string> path = default_activations(checkpoint.path());
  std::vector<LoadedMoe> layers;
  LoadMoeOptions plain;
  plain.mode = MoeMode::kBf16;
  for (int64_t l = 0; l < model.config().layers; ++l) {
    layers.push_back(load_layer(checkpoint, model.config(), l, plain));
  }
  if (path) {
    maxima.source = *path;
    for (size_t l = 0; l < layers.size(); ++l) {
      const Activations activations =
          read_activations(*path, static_cast<int64_t>(l), layers[l], 0);
      maxima.layers.push_back(measure_maxima(layers[l], activations.rows, activations.logits));
      require_usable(maxima.layers.back(), static_cast<int64_t>(l), *path);
    }
    return maxima;
  }
  maxima.source = fmt::format("the first {} bytes of the text", window.size());
  ModelExperts experts(checkpoint, model.config(), std::nullopt, {}, false);
  const auto measure = [&](int64_t l, std::span<const float> rows, std::span<float> residual) {
    const LoadedMoe& layer = layers[static_cast<size_t>(l)];
    maxima.layers.push_back(measure_maxima(layer, rows, router_logits(layer, rows)));
    require_usable(maxima.layers.back(), l, maxima.source);
    experts.add_output(l, rows, residual);
  };
  const std::span windows(&window, 1);
  model.score(windows, model.begin(windows), measure);
  return maxima;
}

// ---- scores

// Windows that go through a layer together: enough rows for every expert.
constexpr size_t kBatch = 16;

struct Text {
  std::string path;
  uint64_t file_bytes = 0;
  std::vector<uint8_t> bytes;  // Those that are used.
  std::vector<Window> windows;
  int64_t num_scored = 0;  // All bytes but the first of each window.
};

struct ModeScore {
  EvalMode mode;
  double bits_per_byte = 0;
  double difference = 0;  // The difference to bf16.
  double seconds = 0;
};

struct Evaluation {
  Text text;
  int64_t window = 0;
  std::string calibration;  // Empty where no mode needed it.
  std::vector<ModeScore> scores;
};

// Reads the first `limit` bytes of a regular file, all where it is 0.
void read_beginning(uint64_t limit, Text& text) {
  std::error_code error;
  std::ifstream file;
  if (std::filesystem::is_regular_file(text.path, error)) file.open(text.path, std::ios::binary);
  if (!file.is_open()) {
    throw Error(ErrorKind::kIo, fmt::format("{}: no file that can be read; give a text with --text",
                                            printable(text.path)));
  }
  text.file_bytes = std::filesystem::file_size(text.path, error);
  text.bytes.resize(limit > 0 ? std::min(text.file_bytes, limit) : text.file_bytes);
  file.read(reinterpret_cast<char*>(text.bytes.data()),
            static_cast<std::streamsize>(text.bytes.size()));
  if (!file) {
    throw Error(ErrorKind::kIo, fmt::format("{}: expected {} bytes, read {}", printable(text.path),
                                            text.bytes.size(), file.gcount()));
  }
}

Text read_text(const EvalArguments& arguments, int64_t window) {
  Text text;
  text.path =
      arguments.text.empty()
          ? (std::filesystem::path(arguments.model) / "calibration" / "heldout.txt").string()
          : arguments.text;
  read_beginning(arguments.num_bytes, text);
  const auto step = static_cast<size_t>(window);
  for (size_t begin = 0; begin < text.bytes.size(); begin += step) {
    const size_t length = std::min(step, text.bytes.size() - begin);
    text.windows.push_back(Window(text.bytes).subspan(begin, length));
    text.num_scored += static_cast<int64_t>(length) - 1;
  }
  if (text.num_scored == 0) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: expected a text of at least 2 bytes, got {}", printable(text.path),
                            text.bytes.size()));
  }
  return text;
}

// The others are compared with bf16: it comes first, whatever was asked for.
std::vector<EvalMode> rows_of(const EvalArguments& arguments) {
  const std::vector<MoeMode>& named = arguments.modes;
  const bool is_all = arguments.is_all_modes || (named.empty() && !arguments.has_fp32);
  std::vector<EvalMode> modes;
  if (is_all || arguments.has_fp32) modes.emplace_back(std::nullopt);
  modes.emplace_back(MoeMode::kBf16);
  for (const MoeModeInfo& info : all_moe_modes()) {
    const bool is_named = std::find(named.begin(), named.end(), info.id) != named.end();
    if ((is_all || is_named) && info.id != MoeMode::kBf16) modes.emplace_back(info.id);
  }
  return modes;
}

// Computes what all modes begin with, and keeps it for the first batches of windows.
class SharedBeginnings {
 public:
  explicit SharedBeginnings(const TextModel& model) : model_(model) {}

  [[nodiscard]] const TextModel& model() const { return model_; }

  std::vector<float> of(size_t batch, std::span<const Window> windows) {
    if (batch < kept_.size()) return kept_[batch];
    std::vector<float> rows = model_.begin(windows);
    if (batch == kept_.size() && (batch + 1) * rows.size() <= kMostValues) kept_.push_back(rows);
    return rows;
  }

 private:
  static constexpr size_t kMostValues = size_t{64} << 20U;

  const TextModel& model_;
  std::vector<std::vector<float>> kept_;
};

ModeScore score_mode(const Checkpoint& checkpoint, const Text& text, EvalMode mode,
                     std::span<const LayerMaxima> maxima, bool fast_sums,
                     SharedBeginnings& beginnings) {
  const TextModel& model = beginnings.model();
  double bits = 0;
  const auto score = [&](int64_t /*call*/, Stream /*stream*/) {
    const size_t batch = std::min(kBatch, text.windows.size());
    ModelExperts experts(checkpoint, model.config(), mode, maxima, fast_sums);
    const auto add_experts = [&](int64_t layer, std::span<const float> rows,
                                 std::span<float> residual) {
      experts.add_output(layer, rows, residual);
    };
    for (size_t first = 0; first < text.windows.size(); first += batch) {
      const size_t count = std::min(batch, text.windows.size() - first);
      const auto windows = std::span(text.windows).subspan(first, count);
      bits += model.score(windows, beginnings.of(first / batch, windows), add_experts);
    }
  };
  const double us = open_host()->run_once(score);
  return {.mode = mode,
          .bits_per_byte = bits / static_cast<double>(text.num_scored),
          .seconds = us * 1e-6};
}

// Buffers of megabytes come and go with every batch. Their pages stay in the process: to get them
// again from Linux takes a tenth of the time.
void keep_freed_memory() {
#if defined(M_TRIM_THRESHOLD)
  constexpr int kMost = 1 << 30;
  mallopt(M_MMAP_THRESHOLD, kMost);
  mallopt(M_TRIM_THRESHOLD, kMost);
#endif
}

Evaluation evaluate(const EvalArguments& arguments) {
  keep_freed_memory();
  const Checkpoint checkpoint(arguments.model);
  const TextModel model(checkpoint);
  Evaluation result;
  result.window = model.config().window;
  result.text = read_text(arguments, result.window);
  StatusLine status(arguments.output);
  const std::vector<EvalMode> modes = rows_of(arguments);
  ModelMaxima maxima;
  if (std::any_of(modes.begin(), modes.end(),
                  [](EvalMode mode) { return mode && has_static_scales(*mode); })) {
    maxima = model_maxima(checkpoint, model, result.text.windows.front());
    result.calibration = maxima.source;
  }
  SharedBeginnings beginnings(model);
  for (const EvalMode mode : modes) {
    status.show(fmt::format("eval {} ({} of {})", eval_mode_name(mode), result.scores.size() + 1,
                            modes.size()));
    result.scores.push_back(
        score_mode(checkpoint, result.text, mode, maxima.layers, arguments.fast_sums, beginnings));
  }
  const auto bf16 = std::find_if(result.scores.begin(), result.scores.end(),
                                 [](const auto& score) { return score.mode == MoeMode::kBf16; });
  for (ModeScore& score : result.scores) {
    score.difference = score.bits_per_byte - bf16->bits_per_byte;
  }
  return result;
}

void print_document(const EvalArguments& arguments, const Evaluation& evaluation) {
  Json document = json_document("eval");
  document["model"] = arguments.model;
  document["text"] = evaluation.text.path;
  document["text_bytes"] = evaluation.text.file_bytes;
  document["used_bytes"] = evaluation.text.bytes.size();
  document["scored_bytes"] = evaluation.text.num_scored;
  document["window"] = evaluation.window;
  document["calibration"] =
      evaluation.calibration.empty() ? Json(nullptr) : Json(evaluation.calibration);
  document["fast_sums"] = arguments.fast_sums;
  document["modes"] = Json::array();
  for (const ModeScore& score : evaluation.scores) {
    document["modes"].push_back(Json{{"mode", eval_mode_name(score.mode)},
                                     {"bits_per_weight", bits_per_weight(score.mode)},
                                     {"bits_per_byte", json_number(score.bits_per_byte)},
                                     {"difference_to_bf16", json_number(score.difference)},
                                     {"seconds", score.seconds}});
  }
  print_json(document);
}

void print_csv(const Evaluation& evaluation) {
  Table table(
      {{"mode"}, {"bits_per_weight"}, {"bits_per_byte"}, {"difference_to_bf16"}, {"seconds"}});
  for (const ModeScore& score : evaluation.scores) {
    table.add_row({eval_mode_name(score.mode), fmt::format("{}", bits_per_weight(score.mode)),
                   fmt::format("{}", score.bits_per_byte), fmt::format("{}", score.difference),
                   fmt::format("{}", score.seconds)});
  }
  write_stdout(table.to_csv());
}

void print_table(const EvalArguments& arguments, const Evaluation& evaluation) {
  const Text& text = evaluation.text;
  std::string out = fmt::format("{} on {}: ", escaped(arguments.model), escaped(text.path));
  out += text.bytes.size() == text.file_bytes
             ? fmt::format("all {} bytes", text.file_bytes)
             : fmt::format("the first {} of {} bytes (--bytes all for the rest)", text.bytes.size(),
                           text.file_bytes);
  out += fmt::format(", {} scored, windows of {}\n", text.num_scored, evaluation.window);
  if (!evaluation.calibration.empty()) {
    out += fmt::format("static scales of fp8_tensor and nvfp4 from {}\n",
                       escaped(evaluation.calibration));
  }
  using enum Table::Align;
  Table table({{"mode", kLeft},
               {"bits per weight", kRight},
               {"bits per byte", kRight},
               {"difference to bf16", kRight},
               {"time", kRight}});
  for (const ModeScore& score : evaluation.scores) {
    table.add_row({eval_mode_name(score.mode), fmt::format("{:.3f}", bits_per_weight(score.mode)),
                   fmt::format("{:.5f}", score.bits_per_byte),
                   score.mode == MoeMode::kBf16 ? "-" : fmt::format("{:+.5f}", score.difference),
                   format_duration(score.seconds)});
  }
  write_stdout(out + "\n" + table.to_text(is_colored(arguments.output.color)));
}

ExitCode run_eval(const EvalArguments& arguments) {
  set_num_threads(arguments.num_threads);
  const Evaluation evaluation = evaluate(arguments);
  if (arguments.output.data == DataFormat::kJson) {
    print_document(arguments, evaluation);
  } else if (arguments.output.data == DataFormat::kCsv) {
    print_csv(evaluation);
  } else if (!arguments.output.is_quiet) {
    print_table(arguments, evaluation);
  }
  return ExitCode::kDone;
}

// The word "all" is 0, as in EvalArguments.
uint64_t parse_text_bytes(const std::string& text) {
  if (text == kAll) return 0;
  const uint64_t size = parse_bytes(text);
  if (size < 2) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("got '{}', expected at least 2 bytes, or all", text));
  }
  return size;
}

}  // namespace

void add_eval(const Commands& commands) {
  CLI::App& command =
      add_command(commands, "eval", "Score a small model on a text with its experts in every mode",
                  kEvalExamples);
  EvalArguments& arguments = arguments_of(command, commands, run_eval);
  add_path(command, "DIR", arguments.model,
           "Qwen3-MoE model over bytes with plain weights, such as models/tiny-moe");
  command
      .add_option("--text", arguments.text, "Text to score; default DIR/calibration/heldout.txt")
      ->option_text("FILE");
  const auto take_mode = [&arguments](const std::string& text) {
    arguments.is_all_modes = arguments.is_all_modes || text == kAll;
    arguments.has_fp32 = arguments.has_fp32 || text == "fp32";
    if (text != kAll && text != "fp32") arguments.modes.push_back(parse_moe_mode(text));
  };
  add_repeated(
      command, "--mode", take_mode,
      fmt::format("May be repeated, or a list with commas; all (default), fp32, or of {}. bf16 is "
                  "always scored",
                  mode_list()))
      ->option_text("MODE,...");
  add_parsed_into(command, "--bytes", parse_text_bytes, arguments.num_bytes,
                  "Score the first BYTES of the text, or all; default 32768")
      ->option_text("BYTES|all");
  add_fast_sums(command, arguments.fast_sums);
  add_threads(command, arguments.num_threads);
  add_output(command, arguments.output, CsvSupport::kYes);
}

}  // namespace narrowfloat::cli

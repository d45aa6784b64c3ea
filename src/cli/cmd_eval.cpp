// narrowfloat eval: bits per byte of a small model on a text, with its experts in every mode. The
// rest of the model is computed in fp32 (text_model.h), so that a difference comes from the
// experts.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/eval/expert_modes.h"
#include "cli/eval/text_model.h"
#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/size_text.h"
#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

// Windows that go through a layer together: enough rows for every expert.
constexpr size_t kBatch = 16;

struct Text {
  std::string path;
  uint64_t file_bytes = 0;
  std::vector<uint8_t> bytes;  // That are used.
  std::vector<Window> windows;
  int64_t num_scored = 0;  // All bytes but the first of each window.
};

struct ModeScore {
  EvalMode mode;
  double bits_per_byte = 0;
  double difference = 0;  // To bf16.
  double seconds = 0;
};

struct Evaluation {
  Text text;
  int64_t window = 0;
  std::string calibration;  // Empty where no mode needed it.
  std::vector<ModeScore> scores;
};

// The first `limit` bytes of a regular file, all where it is 0.
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

// bf16 is what the others are compared with: it comes first, whatever was asked for.
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

ModeScore score_mode(const Checkpoint& checkpoint, const TextModel& model, const Text& text,
                     EvalMode mode, std::span<const LayerMaxima> maxima) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const size_t batch = std::min(kBatch, text.windows.size());
  // The first window is the longest.
  ModelExperts experts(checkpoint, model.config(), mode, maxima,
                       static_cast<int64_t>(batch * text.windows.front().size()));
  const auto add_experts = [&](int64_t layer, std::span<const float> rows,
                               std::span<float> residual) {
    experts.add_output(layer, rows, residual);
  };
  double bits = 0;
  for (size_t first = 0; first < text.windows.size(); first += batch) {
    const size_t count = std::min(batch, text.windows.size() - first);
    bits += model.score(std::span(text.windows).subspan(first, count), add_experts);
  }
  return {.mode = mode,
          .bits_per_byte = bits / static_cast<double>(text.num_scored),
          .seconds = std::chrono::duration<double>(Clock::now() - start).count()};
}

Evaluation evaluate(const EvalArguments& arguments) {
  const Checkpoint checkpoint(arguments.model);
  const TextModel model(checkpoint);
  Evaluation result;
  result.window = model.config().window;
  result.text = read_text(arguments, result.window);
  const bool has_progress = stderr_is_terminal() && !arguments.output.is_quiet;
  const std::vector<EvalMode> modes = rows_of(arguments);
  ModelMaxima maxima;
  if (std::any_of(modes.begin(), modes.end(),
                  [](EvalMode mode) { return mode && has_static_scales(*mode); })) {
    maxima = model_maxima(checkpoint, model, result.text.windows.front());
    result.calibration = maxima.source;
  }
  for (const EvalMode mode : modes) {
    if (has_progress) {
      write_stderr(fmt::format("\r\x1b[Keval {} ({} of {})", eval_mode_name(mode),
                               result.scores.size() + 1, modes.size()));
    }
    result.scores.push_back(score_mode(checkpoint, model, result.text, mode, maxima.layers));
  }
  if (has_progress) write_stderr("\r\x1b[K");
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

}  // namespace

ExitCode run(const EvalArguments& arguments) {
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

}  // namespace narrowfloat::cli

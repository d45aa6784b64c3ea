// Options of the commands that compute the layers of a checkpoint, eval and moe run, and what they
// share with the others of moe.
#include "cli/options_moe.h"

#include <fmt/format.h>

#include "cli/size_text.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kEvalExamples = R"(Examples:
  narrowfloat eval models/tiny-moe
  narrowfloat eval models/tiny-moe --bytes all --mode nvfp4_bf16 --mode mxfp4_mxfp8 --json
)";
constexpr const char* kRunExamples = R"(Examples:
  narrowfloat moe run models/tiny-moe --layer 1 --mode all
  narrowfloat moe run out --layer 0 --activations calibration.safetensors --reference MODEL --json
)";
constexpr std::string_view kAll = "all";

// "all" is 0, as in EvalArguments.
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

std::string mode_list() {
  std::string list;
  for (const MoeModeInfo& info : all_moe_modes()) {
    list += fmt::format("{}{}", list.empty() ? "" : ", ", info.name);
  }
  return list;
}

void add_modes(CLI::App& command, std::vector<MoeMode>& modes, bool& is_all,
               const std::string& help) {
  add_parsed(
      command, "--mode", [](const std::string& text) { return text; },
      [&modes, &is_all](const std::string& text) {
        if (text == kAll) {
          is_all = true;
        } else {
          modes.push_back(parse_moe_mode(text));
        }
      },
      help)
      ->option_text("MODE ...")
      ->trigger_on_parse();
}

void add_min_time(CLI::App& command, double& min_seconds) {
  command.add_option("--min-time", min_seconds, "Seconds of timed runs for each case; default 0.5")
      ->option_text("S")
      ->check(CLI::Range(0.0, 3600.0));
}

void add_checked_device(CLI::App& command, Device& device) {
  add_parsed_into(command, "--device", parse_device, device,
                  "cpu (default), cuda or cuda:N; results are checked on the CPU")
      ->option_text("DEVICE");
}

void add_eval(CLI::App& app, EvalArguments& arguments) {
  CLI::App& command = add_command(
      app, "eval", "Score a small model on a text with its experts in every mode", kEvalExamples);
  add_path(command, "DIR", arguments.model,
           "Qwen3-MoE model over bytes with plain weights, such as models/tiny-moe");
  command
      .add_option("--text", arguments.text, "Text to score; default DIR/calibration/heldout.txt")
      ->option_text("FILE");
  add_parsed(
      command, "--mode", [](const std::string& text) { return text; },
      [&arguments](const std::string& text) {
        arguments.is_all_modes = arguments.is_all_modes || text == kAll;
        arguments.has_fp32 = arguments.has_fp32 || text == "fp32";
        if (text != kAll && text != "fp32") arguments.modes.push_back(parse_moe_mode(text));
      },
      fmt::format("May be repeated; all (default), fp32, or of {}. bf16 is always scored",
                  mode_list()))
      ->option_text("MODE ...")
      ->trigger_on_parse();
  add_parsed_into(command, "--bytes", parse_text_bytes, arguments.num_bytes,
                  "Score the first BYTES of the text, or all; default 32768")
      ->option_text("BYTES|all");
  add_threads(command, arguments.num_threads);
  add_output(command, arguments.output, CsvSupport::kYes);
}

void add_moe_run(CLI::App& app, MoeRunArguments& arguments) {
  CLI::App& command =
      add_command(app, "run", "Run a layer of a checkpoint on real activations: error, load, time",
                  kRunExamples);
  add_path(command, "DIR", arguments.model, "Checkpoint with experts, plain or quantized");
  command.add_option("--layer", arguments.layer, "Number of the layer")
      ->required()
      ->option_text("L REQUIRED")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 31));
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
  command.add_option("--tokens", arguments.max_tokens, "The first N rows of the file; default all")
      ->option_text("N")
      ->check(CLI::Range(int64_t{1}, kMaxTokens));
  add_checked_device(command, arguments.device);
  add_threads(command, arguments.num_threads);
  add_min_time(command, arguments.min_seconds);
  add_output(command, arguments.output, CsvSupport::kYes);
}

}  // namespace narrowfloat::cli

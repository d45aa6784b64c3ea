// Options of the commands that compute Mixture-of-Experts layers: eval, moe run, moe bench.
#include <algorithm>
#include <bit>

#include <fmt/format.h>

#include "cli/moe/shape.h"
#include "cli/option_helpers.h"
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
constexpr const char* kBenchExamples = R"(Examples:
  narrowfloat moe bench --shape gpt-oss-20b
  narrowfloat moe bench --shape 2048,768,32,4 --tokens 1,64 --mode all --routing zipf --csv
  narrowfloat moe bench --shape deepseek-v3 --ep 0/16 --mode nvfp4_bf16
  narrowfloat moe bench --shape deepseek-v3 --device cuda --tokens 1,32,1024
)";

constexpr int64_t kMaxTokens = 1 << 20;
constexpr int64_t kMaxRanks = 4096;
constexpr std::string_view kAll = "all";

std::string mode_list() {
  std::string list;
  for (const MoeModeInfo& info : all_moe_modes()) {
    list += fmt::format("{}{}", list.empty() ? "" : ", ", info.name);
  }
  return list;
}

std::vector<int64_t> parse_token_list(const std::string& text) {
  return parse_count_list(
      text, kMaxTokens, fmt::format("numbers of tokens such as 1,8,64, each 1 to {}", kMaxTokens));
}

int32_t parse_token_tile(const std::string& text) {
  constexpr std::string_view kExpected = "a power of two from 1 to 1024";
  const int64_t tile = parse_count(text, 1, 1024, kExpected);
  if (std::has_single_bit(static_cast<uint64_t>(tile))) return static_cast<int32_t>(tile);
  throw Error(ErrorKind::kInvalidArgument, fmt::format("got '{}', expected {}", text, kExpected));
}

struct Rank {
  int32_t rank = 0;
  int32_t num_ranks = 1;
};
Rank parse_rank(const std::string& text) {
  constexpr std::string_view kExpected =
      "R/N, rank R (from 0) of N that share the experts, such as 0/8";
  const size_t slash = std::min(text.find('/'), text.size());
  const std::string_view after = std::string_view(text).substr(std::min(slash + 1, text.size()));
  const int64_t num_ranks = parse_count(after, 1, kMaxRanks, kExpected);
  const int64_t rank =
      parse_count(std::string_view(text).substr(0, slash), 0, num_ranks - 1, kExpected);
  return {static_cast<int32_t>(rank), static_cast<int32_t>(num_ranks)};
}

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

// Called for every --mode, not once with the last one.
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

void add_device(CLI::App& command, Device& device) {
  add_parsed_into(command, "--device", parse_device, device,
                  "cpu (default), cuda or cuda:N; results are checked on the CPU")
      ->option_text("DEVICE");
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
  command.add_option("--tokens", arguments.max_tokens, "The first N rows of the file; default all")
      ->option_text("N")
      ->check(CLI::Range(int64_t{1}, kMaxTokens));
  add_device(command, arguments.device);
  add_threads(command, arguments.num_threads);
  add_min_time(command, arguments.min_seconds);
  add_output(command, arguments.output, CsvSupport::kYes);
}

void add_moe_bench(CLI::App& app, MoeBenchArguments& arguments) {
  CLI::App& command = add_command(
      app, "bench", "Time a layer with random weights in the shape of a model, checking results",
      kBenchExamples);
  add_parsed_into(
      command, "--shape",
      [](const std::string& text) {
        parse_moe_shape(text);
        return text;
      },
      arguments.shape,
      fmt::format("{}, or H,I,E,k: hidden and intermediate size, experts, experts a token",
                  moe_shape_names()))
      ->required()
      ->option_text("SHAPE REQUIRED");
  add_parsed_into(command, "--tokens", parse_token_list, arguments.tokens,
                  "Tokens of a run, one case each; default 1,8,64,512")
      ->option_text("T,...");
  add_modes(command, arguments.modes, arguments.is_all_modes,
            fmt::format("May be repeated; all, or of {}. Default: that of the model's own "
                        "checkpoint, bf16 for H,I,E,k",
                        mode_list()));
  command
      .add_option("--routing", arguments.routing,
                  "uniform (default), zipf, or a safetensors file with *topk_ids (I32 [T, k]) or "
                  "*router_logits ([T, E])")
      ->option_text("ROUTING");
  add_parsed(
      command, "--ep", parse_rank,
      [&arguments](Rank rank) {
        arguments.rank = rank.rank;
        arguments.num_ranks = rank.num_ranks;
      },
      "Rank R of N ranks that share the experts; default 0/1")
      ->option_text("R/N");
  add_parsed_into(command, "--max-memory", parse_bytes, arguments.max_memory_bytes,
                  "Memory for weights and buffers; shapes that need more run with fewer experts. "
                  "0, the default, is six tenths of what is available")
      ->option_text("BYTES");
  add_parsed_into(command, "--token-tile", parse_token_tile, arguments.token_tile,
                  "Rows of an expert are padded to a multiple; default: by the number of tokens")
      ->option_text("N");
  command.add_flag("--stages", arguments.has_stages, "Time the stages of the layer, too")
      ->option_text(" ");
  command.add_option("--commit", arguments.commit, "Text for the document: what was measured")
      ->option_text("TEXT");
  add_device(command, arguments.device);
  add_threads(command, arguments.num_threads);
  add_min_time(command, arguments.min_seconds);
  add_output(command, arguments.output, CsvSupport::kYes);
}

}  // namespace

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

void add_moe(CLI::App& app, MoeRunArguments& run, MoeBenchArguments& bench) {
  CLI::App& command = *app.add_subcommand("moe", "Run or time a Mixture-of-Experts layer");
  command.require_subcommand(0, 1);
  command.footer("Try: narrowfloat moe run --help, narrowfloat moe bench --help");
  add_moe_run(command, run);
  add_moe_bench(command, bench);
}

}  // namespace narrowfloat::cli

// Options of the commands that measure Mixture-of-Experts layers with made-up weights: moe bench
// and moe gemm.
#include "cli/options_moe.h"

#include <algorithm>
#include <bit>

#include <fmt/format.h>

#include "cli/moe/shape.h"
#include "cli/size_text.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kBenchExamples = R"(Examples:
  narrowfloat moe bench --shape gpt-oss-20b
  narrowfloat moe bench --shape 2048,768,32,4 --tokens 1,64 --mode all --routing zipf --csv
  narrowfloat moe bench --shape deepseek-v3 --ep 0/16 --mode nvfp4_bf16
  narrowfloat moe bench --shape deepseek-v3 --device cuda --tokens 1,32,1024
)";
constexpr const char* kTuneExamples = R"(Examples:
  narrowfloat moe tune --shape qwen3-30b-a3b --device cuda --out h100.json
  narrowfloat moe bench --shape qwen3-30b-a3b --device cuda --tuning h100.json
)";
constexpr const char* kMoeExplainExamples = R"(Examples:
  narrowfloat moe explain --shape gpt-oss-20b --tokens 1,64
  narrowfloat moe explain --shape deepseek-v3 --device cuda --tuning h100.json --json
)";
constexpr const char* kGemmExamples = R"(Examples:
  narrowfloat moe gemm --shape 1024,512,8 --rows 16,256 --mode mxfp4_bf16
  narrowfloat moe gemm --shape 4096,7168,8 --rows 16384 --device cuda
)";

constexpr int64_t kMaxRanks = 4096;
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

void add_token_tile(CLI::App& command, std::optional<int32_t>& token_tile) {
  add_parsed_into(command, "--token-tile", parse_token_tile, token_tile,
                  "Rows of an expert are padded to a multiple; default: by the number of tokens")
      ->option_text("N");
}

void add_commit(CLI::App& command, std::string& commit) {
  command.add_option("--commit", commit, "Text for the document: what was measured")
      ->option_text("TEXT");
}

std::vector<int64_t> parse_gemm_shape(const std::string& text) {
  constexpr int64_t kMaxLayerExtent = 1 << 20;
  constexpr std::string_view kExpected =
      "three numbers N,K,G such as 4096,7168,8: rows and columns of a group's weights, groups";
  std::vector<int64_t> shape = parse_count_list(text, kMaxLayerExtent, kExpected);
  if (shape.size() == 3 && shape[2] <= 4096) return shape;
  throw Error(ErrorKind::kInvalidArgument, fmt::format("got '{}', expected {}", text, kExpected));
}

void add_moe_gemm(CLI::App& app, MoeGemmArguments& arguments) {
  CLI::App& command = add_command(
      app, "gemm", "Time one grouped GEMM of random weights, checking results", kGemmExamples);
  add_parsed(
      command, "--shape", parse_gemm_shape,
      [&arguments](const std::vector<int64_t>& shape) {
        arguments.n = shape[0];
        arguments.k = shape[1];
        arguments.groups = static_cast<int32_t>(shape[2]);
      },
      "N,K,G: weights of G groups, [N, K] each")
      ->required()
      ->option_text("N,K,G REQUIRED");
  add_parsed_into(command, "--rows", parse_token_list, arguments.rows,
                  "Rows of all groups together, spread evenly; one case each")
      ->required()
      ->option_text("M,... REQUIRED");
  add_parsed(
      command, "--mode", [](const std::string& text) { return parse_moe_mode(text); },
      [&arguments](MoeMode mode) { arguments.mode = mode; },
      fmt::format("Default fp8_block; of {}", mode_list()))
      ->option_text("MODE");
  add_token_tile(command, arguments.token_tile);
  add_commit(command, arguments.commit);
  add_checked_device(command, arguments.device);
  add_threads(command, arguments.num_threads);
  add_min_time(command, arguments.min_seconds);
  add_output(command, arguments.output, CsvSupport::kYes);
}

// What names a layer: shape, modes, and the part of the experts.
template <typename Arguments>
void add_layer(CLI::App& command, Arguments& arguments) {
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
  add_modes(command, arguments.modes, arguments.is_all_modes,
            fmt::format("May be repeated; all, or of {}. Default: that of the model's own "
                        "checkpoint, bf16 for H,I,E,k",
                        mode_list()));
  add_parsed(
      command, "--ep", parse_rank,
      [&arguments](Rank rank) {
        arguments.rank = rank.rank;
        arguments.num_ranks = rank.num_ranks;
      },
      "Rank R of N ranks that share the experts; default 0/1")
      ->option_text("R/N");
}

void add_routing(CLI::App& command, std::string& routing) {
  command
      .add_option("--routing", routing,
                  "uniform (default), zipf, or a safetensors file with *topk_ids (I32 [T, k]) or "
                  "*router_logits ([T, E])")
      ->option_text("ROUTING");
}

void add_memory(CLI::App& command, uint64_t& max_bytes, const std::string& what) {
  add_parsed_into(command, "--max-memory", parse_bytes, max_bytes,
                  fmt::format("Memory for weights and buffers; shapes that need more {}. 0, the "
                              "default, is six tenths of what is available",
                              what))
      ->option_text("BYTES");
}

void add_tuning(CLI::App& command, std::string& tuning) {
  command
      .add_option("--tuning", tuning,
                  "Token tiles of a file that moe tune wrote, where it has some for this layer")
      ->option_text("FILE");
}

void add_moe_bench(CLI::App& app, MoeBenchArguments& arguments) {
  CLI::App& command = add_command(
      app, "bench", "Time a layer with random weights in the shape of a model, checking results",
      kBenchExamples);
  add_layer(command, arguments);
  add_parsed_into(command, "--tokens", parse_token_list, arguments.tokens,
                  "Tokens of a run, one case each; default 1,8,64,512")
      ->option_text("T,...");
  add_routing(command, arguments.routing);
  add_memory(command, arguments.max_memory_bytes, "run with fewer experts");
  add_token_tile(command, arguments.token_tile);
  add_tuning(command, arguments.tuning);
  command.add_flag("--stages", arguments.has_stages, "Time the stages of the layer, too")
      ->option_text(" ");
  add_commit(command, arguments.commit);
  add_checked_device(command, arguments.device);
  add_threads(command, arguments.num_threads);
  add_min_time(command, arguments.min_seconds);
  add_output(command, arguments.output, CsvSupport::kYes);
}

void add_moe_tune(CLI::App& app, MoeTuneArguments& arguments) {
  CLI::App& command = add_command(
      app, "tune", "Find token tiles that are faster than the rule's, by measuring", kTuneExamples);
  add_layer(command, arguments);
  add_parsed_into(command, "--tokens", parse_token_list, arguments.tokens,
                  "Tokens of a run, one case each; default the powers of two up to 4096")
      ->option_text("T,...");
  add_routing(command, arguments.routing);
  add_memory(command, arguments.max_memory_bytes, "are refused");
  command
      .add_option("-o,--out", arguments.target,
                  "File for the tiles that are faster, for --tuning and MoeTuning::load()")
      ->option_text("FILE");
  command.add_flag("--force", arguments.is_forced, "Replace FILE")->option_text(" ");
  add_checked_device(command, arguments.device);
  add_threads(command, arguments.num_threads);
  add_min_time(command, arguments.min_seconds);
  add_output(command, arguments.output, CsvSupport::kNo);
}

void add_moe_explain(CLI::App& app, MoeExplainArguments& arguments) {
  CLI::App& command =
      add_command(app, "explain", "Token tile and implementations of a layer, and why these",
                  kMoeExplainExamples);
  add_layer(command, arguments);
  add_parsed_into(command, "--tokens", parse_token_list, arguments.tokens,
                  "Tokens of a run, one case each; default 1")
      ->option_text("T,...");
  add_token_tile(command, arguments.token_tile);
  add_tuning(command, arguments.tuning);
  add_parsed_into(command, "--device", parse_device, arguments.device,
                  "cpu (default), cuda or cuda:N")
      ->option_text("DEVICE");
  add_output(command, arguments.output, CsvSupport::kNo);
}

}  // namespace

void add_moe(CLI::App& app, MoeArguments& arguments) {
  CLI::App& command =
      *app.add_subcommand("moe", "Run, time, tune or explain a Mixture-of-Experts layer");
  command.require_subcommand(0, 1);
  command.footer("Try: narrowfloat moe run --help, narrowfloat moe bench --help");
  add_moe_run(command, arguments.run);
  add_moe_bench(command, arguments.bench);
  add_moe_gemm(command, arguments.gemm);
  add_moe_tune(command, arguments.tune);
  add_moe_explain(command, arguments.explain);
}

}  // namespace narrowfloat::cli

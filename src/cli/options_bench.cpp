// Options of bench: the quick look at the CPU, and the sweeps that --device asks for.
#include <fmt/format.h>

#include "cli/bench/sweep_case.h"
#include "cli/option_helpers.h"
#include "cli/size_text.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  narrowfloat bench
  narrowfloat bench quantize --format nvfp4 --format mxfp4 --shape 8192x4096 --csv
  narrowfloat bench quantize --device cuda --rows 1,128,16384 --cols 7168 --layout all
  narrowfloat bench activation --device cuda --tokens 1,32,1024 --json
  narrowfloat bench --device cuda --mode comparison --shape 16384x7168
)";

constexpr int64_t kMaxSweepExtent = int64_t{1} << 32U;
constexpr int64_t kMaxSweepTokens = 1 << 20;
constexpr int64_t kMaxSweepExperts = 1 << 16;
constexpr int64_t kMaxTile = 1024;

std::vector<int64_t> parse_extents(const std::string& text) {
  return parse_count_list(text, kMaxSweepExtent, "whole numbers such as 1,128,4096");
}

std::vector<int64_t> parse_tokens(const std::string& text) {
  return parse_count_list(text, kMaxSweepTokens, "numbers of tokens such as 1,32,1024");
}

QuantizeSource parse_source(const std::string& text) {
  for (int i = 0; i <= static_cast<int>(QuantizeSource::kAddRmsNorm); ++i) {
    const auto source = static_cast<QuantizeSource>(i);
    if (text == name(source)) return source;
  }
  throw Error(
      ErrorKind::kInvalidArgument,
      fmt::format("got '{}', expected one of plain, silu_mul, smooth, rmsnorm, add_rmsnorm", text));
}

using Options = std::vector<CLI::Option*>;

CLI::Option* add_device(CLI::App& command, SweepArguments& sweep) {
  return add_parsed_into(
             command, "--device", parse_device, sweep.device,
             "Sweep on cpu, cuda or cuda:N: more shapes, layouts, sources and operations")
      ->option_text("DEVICE");
}

Options add_matrix_options(CLI::App& command, SweepArguments& sweep) {
  const auto store_layout = [&sweep](const std::string& text) {
    if (text == "all") {
      sweep.is_all_layouts = true;
    } else {
      sweep.layouts.push_back(parse_scale_layout(text));
    }
  };
  return {add_parsed_into(command, "--rows", parse_extents, sweep.rows, "Numbers of rows")
              ->option_text("M,..."),
          add_parsed_into(command, "--cols", parse_extents, sweep.cols, "Numbers of columns")
              ->option_text("K,..."),
          // Stored by the reader, so that a wrong name is a usage error that names the option.
          add_parsed(
              command, "--layout",
              [store_layout](const std::string& text) {
                store_layout(text);
                return text;
              },
              [](const std::string& /*stored*/) {},
              "Scale layout, or all; may be repeated; default that of the format")
              ->option_text("LAYOUT ...")
              ->trigger_on_parse(),
          add_parsed(
              command, "--source", parse_source,
              [&sweep](QuantizeSource source) { sweep.sources.push_back(source); },
              "What quantization is fused with: plain (default), silu_mul, smooth, rmsnorm or "
              "add_rmsnorm; may be repeated")
              ->option_text("SOURCE ...")
              ->trigger_on_parse(),
          add_choice<bool>(command, "--encode-scale", {{"given", true}, {"amax", false}},
                           sweep.is_scale_given,
                           "Scale of the whole tensor: given (default), or from its maximum: amax")
              ->option_text("WHICH"),
          command
              .add_flag("--four-over-six", sweep.has_four_over_six,
                        "NVFP4: choose each block's scale by its error")
              ->option_text(" ")};
}

Options add_activation_options(CLI::App& command, SweepArguments& sweep) {
  ActivationShape& shape = sweep.activation;
  return {
      add_parsed_into(command, "--tokens", parse_tokens, sweep.tokens,
                      "activation: numbers of tokens; default 1,32,256,1024,4096,16384")
          ->option_text("T,..."),
      command.add_option("--top-k", shape.top_k, "activation: experts of a token; default 8")
          ->check(CLI::Range(int64_t{1}, kMaxSweepExperts))
          ->option_text("K"),
      command.add_option("--experts", shape.experts, "activation: default 256")
          ->check(CLI::Range(int64_t{1}, kMaxSweepExperts))
          ->option_text("E"),
      command.add_option("--inter", shape.inter, "activation: columns of the result; default 2048")
          ->check(CLI::Range(int64_t{128}, int64_t{1} << 20U))
          ->option_text("I"),
      command
          .add_option("--tile", shape.tile,
                      "activation: rows of an expert are padded to a multiple; default 8")
          ->check(CLI::Range(int64_t{1}, kMaxTile))
          ->option_text("N"),
      add_choice<bool>(command, "--input", {{"fp8", false}, {"bf16", true}}, shape.has_bf16_input,
                       "activation: fp8 (default) or bf16")
          ->option_text("TYPE"),
      add_choice<bool>(command, "--maps", {{"both", true}, {"slots", false}}, shape.has_inverse_map,
                       "activation: maps of slots to rows and back (default), or slots only")
          ->option_text("WHICH")};
}

Options add_method_options(CLI::App& command, SweepArguments& sweep) {
  constexpr double kMaxMilliseconds = 1e5;
  constexpr int kMaxReplays = 1000;
  return {add_choice<SweepMode>(
              command, "--mode",
              {{"bandwidth", SweepMode::kBandwidth}, {"comparison", SweepMode::kComparison}},
              sweep.mode, "Table: a row for each case (default), or formats side by side")
              ->option_text("MODE"),
          add_choice<bool>(command, "--l2", {{"cold", false}, {"warm", true}}, sweep.is_cache_warm,
                           "Buffers rotate through more than the cache (default), or stay in it")
              ->option_text("STATE"),
          add_choice<EdgeChoice>(command, "--pdl",
                                 {{"both", EdgeChoice::kBoth},
                                  {"on", EdgeChoice::kProgrammatic},
                                  {"off", EdgeChoice::kPlain}},
                                 sweep.edges,
                                 "CUDA: programmatic dependent launch on, off, or both (default)")
              ->option_text("WHICH"),
          command
              .add_option("--replay-ms", sweep.replay_ms,
                          "Calls are timed in replays of about so long; default 3")
              ->check(CLI::Range(0.0, kMaxMilliseconds))
              ->option_text("MS"),
          command.add_option("--replays", sweep.replays, "Timed replays; default 9")
              ->check(CLI::Range(1, kMaxReplays))
              ->option_text("N"),
          command.add_option("--commit", sweep.commit, "Text for the document: what was measured")
              ->option_text("TEXT")};
}

void add_common(CLI::App& command, BenchArguments& arguments) {
  add_parsed(
      command, "--format", [](const std::string& text) { return parse_format(text); },
      [&arguments](FormatId format) { arguments.formats.push_back(format); },
      fmt::format("May be repeated; default all: {}", format_list()))
      ->option_text("FORMAT ...")
      // Called for every --format, not once with the last one.
      ->trigger_on_parse();
  add_parsed_into(command, "--dtype", parse_target_dtype, arguments.dtype,
                  "High-precision side: bf16 (default), fp16 or fp32")
      ->option_text("DTYPE");
  add_parsed_into(command, "--math", parse_math_mode, arguments.math,
                  "Arithmetic of quantization: exact (default) or fast")
      ->option_text("MODE");
  add_threads(command, arguments.num_threads);
}

}  // namespace

void add_bench(CLI::App& app, BenchArguments& arguments) {
  CLI::App& command =
      add_command(app, "bench", "Time quantization on this machine, checking results", kExamples);
  command
      .add_option("OP", arguments.op,
                  "quantize or dequantize, default both; with --device also amax, relayout, "
                  "activation, group_quantize, kv_cache, shuffle and pack_bits")
      ->check(CLI::IsMember({"quantize", "dequantize", "amax", "relayout", "activation",
                             "group_quantize", "kv_cache", "shuffle", "pack_bits"}))
      ->option_text(" ");
  add_common(command, arguments);
  CLI::Option* const shape = add_parsed(
                                 command, "--shape", parse_nonempty_shape,
                                 [&arguments](MatrixShape parsed) {
                                   arguments.rows = parsed.rows;
                                   arguments.cols = parsed.cols;
                                 },
                                 "Rows and columns; default 4096x4096")
                                 ->option_text("MxK");
  CLI::Option* const min_time =
      command
          .add_option("--min-time", arguments.min_seconds,
                      "Without --device: seconds of timed runs for each case; default 0.5")
          ->option_text("S")
          ->check(CLI::Range(0.0, 3600.0));
  CLI::Option* const device = add_device(command, arguments.sweep)->excludes(min_time);
  const Options matrix = add_matrix_options(command, arguments.sweep);
  shape->excludes(matrix[0])->excludes(matrix[1]);
  for (const Options& options : {matrix, add_activation_options(command, arguments.sweep),
                                 add_method_options(command, arguments.sweep)}) {
    for (CLI::Option* const option : options) option->needs(device);
  }
  add_output(command, arguments.output, CsvSupport::kYes);
}

}  // namespace narrowfloat::cli

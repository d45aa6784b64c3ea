// narrowfloat-bench bench: the speed of every format on the CPU, beside memcpy of the same bytes in
// the same run; with --device a sweep of operations over shapes, layouts and sources, on the CPU or
// a GPU. Every result is checked in the same run; a wrong one is exit code 1.
#include <algorithm>
#include <memory>

#include <fmt/format.h>

#include "bench_cli/commands.h"
#include "bench_cli/measure.h"
#include "cli_common/command_line.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

// ---- the quick look

struct QuickCase {
  SweepCase what;
  SweepResult result;
  CallTime copy;

  // Bytes that one call reads and writes; a second read for a computed scale does not count.
  [[nodiscard]] uint64_t size_bytes() const {
    return result.read_bytes / (what.is_scale_given ? 1 : 2) + result.write_bytes;
  }
  [[nodiscard]] double gb_per_second(const CallTime& time) const {
    return billions_per_second(static_cast<double>(size_bytes()), time.median_us * 1e-6);
  }
};

// Operations are the outer loop and formats the inner one, so that people find what they compare
// side by side. Scales are computed from the tensor's maximum, as in a first-time quantization.
std::vector<SweepCase> quick_cases(const BenchArguments& arguments) {
  std::vector<SweepCase> cases = cases_of(arguments);
  for (SweepCase& what : cases) {
    what.is_scale_given = what.op != BenchOp::kQuantize || !has_tensor_scale(what.format);
  }
  return cases;
}

// Half of the bytes are read, half written, on as many threads as operations may use.
CallTime time_copy(Machine& machine, uint64_t size_bytes, double min_seconds) {
  const uint64_t half = size_bytes / 2;
  std::byte* const memory = machine.reserve(2 * aligned(half));
  machine.fill_bytes(memory, 1, 2 * aligned(half));
  const auto copy = [&](int64_t /*call*/, Stream stream) {
    machine.queue_copy(memory + aligned(half), memory, half, stream);
  };
  return machine.time_calls(copy, machine.plan_for(min_seconds, 1, 0));
}

std::string shape_text(const BenchArguments& arguments) {
  return fmt::format("{}x{}", arguments.rows, arguments.cols);
}

void print_document(const BenchArguments& arguments, const std::vector<QuickCase>& cases) {
  Json document = json_document("bench");
  document["version"] = version();
  document["cpu"] = cpu_info().model;
  document["threads"] = num_threads();
  document["shape"] = shape_text(arguments);
  document["dtype"] = name(arguments.dtype);
  document["math"] = name(arguments.math);
  document["min_seconds"] = arguments.min_seconds;
  document["environment"] = environment_settings();
  document["cases"] = Json::array();
  for (const QuickCase& one : cases) {
    const CallTime& time = *one.result.plain;
    document["cases"].push_back(Json{{"op", name(one.what.op)},
                                     {"format", name(one.what.format)},
                                     {"implementation", one.result.implementation},
                                     {"size_bytes", one.size_bytes()},
                                     {"runs", time.num_calls()},
                                     {"median_seconds", time.median_us * 1e-6},
                                     {"gb_per_second", one.gb_per_second(time)},
                                     {"memcpy_gb_per_second", one.gb_per_second(one.copy)},
                                     {"correct", one.result.is_correct()}});
  }
  print_json(document);
}

// The table is printed as text and as CSV: the names of the columns carry the units.
Table quick_table(const std::vector<QuickCase>& cases) {
  using enum Table::Align;
  Table table({{"op", kLeft},
               {"format", kLeft},
               {"implementation", kLeft},
               {"median_ms", kRight},
               {"gb_per_s", kRight},
               {"memcpy_gb_per_s", kRight},
               {"percent_of_memcpy", kRight},
               {"runs", kRight},
               {"result", kLeft}});
  for (const QuickCase& one : cases) {
    const CallTime& time = *one.result.plain;
    const double rate = one.gb_per_second(time);
    const double copy_rate = one.gb_per_second(one.copy);
    const bool is_correct = one.result.is_correct();
    table.add_row({std::string(name(one.what.op)), std::string(name(one.what.format)),
                   one.result.implementation, fmt::format("{:.3f}", time.median_us * 1e-3),
                   fmt::format("{:.2f}", rate), fmt::format("{:.2f}", copy_rate),
                   fmt::format("{:.0f}", percent_of(rate, copy_rate)),
                   std::to_string(time.num_calls()), is_correct ? "correct" : "WRONG"},
                  is_correct ? Tone::kPlain : Tone::kBad);
  }
  return table;
}

void print_results(const BenchArguments& arguments, const std::vector<QuickCase>& cases) {
  switch (arguments.output.data) {
    case DataFormat::kJson:
      return print_document(arguments, cases);
    case DataFormat::kCsv:
      return write_stdout(quick_table(cases).to_csv());
    case DataFormat::kTable:
      if (arguments.output.is_quiet) return;
      write_stdout(
          fmt::format("{} {}, {} mode, {} threads, {}; GB/s count bytes read and written\n",
                      shape_text(arguments), name(arguments.dtype), name(arguments.math),
                      num_threads(), cpu_info().model));
      return write_stdout(quick_table(cases).to_text(is_colored(arguments.output.color)));
  }
}

// Each case is followed by a memcpy of as many bytes: both see the machine in the same state.
std::vector<QuickCase> measure_quickly(const BenchArguments& arguments) {
  const std::unique_ptr<Machine> host = open_host();
  SweepArguments method;
  method.is_cache_warm = true;
  method.min_seconds = arguments.min_seconds;
  Measurement measurement(*host, method, {});
  StatusLine status(arguments.output);
  std::vector<QuickCase> cases;
  for (const SweepCase& what : quick_cases(arguments)) {
    status.show(fmt::format("{} {}", name(what.op), name(what.format)));
    QuickCase one{what, measurement.measure(what), {}};
    if (one.result.error) throw Error(*one.result.error, one.result.wrong);
    one.copy = time_copy(*host, one.size_bytes(), arguments.min_seconds);
    cases.push_back(one);
  }
  return cases;
}

// ---- sweeps

// A wrong result counts most: it is what nobody may overlook.
ExitCode exit_code_of(const std::vector<Measured>& cases) {
  ExitCode code = ExitCode::kDone;
  for (const auto& [what, result] : cases) {
    if (result.is_correct()) continue;
    if (!result.error) return ExitCode::kFindings;
    code = exit_code(*result.error);
  }
  return code;
}

// A case that fails does not end a sweep, unless the device itself failed: nothing works after
// that.
ExitCode run_sweep(const BenchArguments& arguments) {
  const std::vector<SweepCase> planned = cases_of(arguments);
  const std::unique_ptr<Machine> machine = open_machine(*arguments.sweep.device);
  const MachineRates rates = measure_rates(*machine, arguments.sweep.replays);
  Measurement measurement(*machine, arguments.sweep, rates);
  std::vector<Measured> cases;
  {
    StatusLine status(arguments.output);
    for (const SweepCase& what : planned) {
      status.show(fmt::format("{} of {}", cases.size() + 1, planned.size()));
      cases.push_back({what, measurement.measure(what)});
      if (cases.back().result.error == ErrorKind::kDevice) break;
    }
  }
  print_sweep(arguments, *machine, rates, cases);
  return exit_code_of(cases);
}

ExitCode run_bench(const BenchArguments& arguments) {
  set_num_threads(arguments.num_threads);
  if (arguments.sweep.device) return run_sweep(arguments);
  if (!arguments.op.empty() && arguments.op != "quantize" && arguments.op != "dequantize") {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("bench {} needs --device, cpu or cuda:N", arguments.op));
  }
  const std::vector<QuickCase> cases = measure_quickly(arguments);
  print_results(arguments, cases);
  const bool is_all_correct = std::all_of(
      cases.begin(), cases.end(), [](const QuickCase& one) { return one.result.is_correct(); });
  return is_all_correct ? ExitCode::kDone : ExitCode::kFindings;
}

// ---- options

constexpr const char* kBenchExamples = R"(Examples:
  narrowfloat-bench bench
  narrowfloat-bench bench quantize --format nvfp4 --format mxfp4 --shape 8192x4096 --csv
  narrowfloat-bench bench quantize --device cuda --rows 1,128,16384 --cols 7168 --layout all
  narrowfloat-bench bench activation --device cuda --tokens 1,32,1024 --json
  narrowfloat-bench bench --device cuda --mode comparison --shape 16384x7168
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
  const auto take_layout = [&sweep](const std::string& text) {
    if (text == "all") {
      sweep.is_all_layouts = true;
    } else {
      sweep.layouts.push_back(parse_scale_layout(text));
    }
  };
  const auto take_source = [&sweep](const std::string& text) {
    sweep.sources.push_back(parse_source(text));
  };
  return {add_parsed_into(command, "--rows", parse_extents, sweep.rows, "Numbers of rows")
              ->option_text("M,..."),
          add_parsed_into(command, "--cols", parse_extents, sweep.cols, "Numbers of columns")
              ->option_text("K,..."),
          add_repeated(command, "--layout", take_layout,
                       "Scale layout, or all; may be repeated; default that of the format")
              ->option_text("LAYOUT ..."),
          add_repeated(command, "--source", take_source,
                       "What quantization is fused with: plain (default), silu_mul, smooth, "
                       "rmsnorm or add_rmsnorm; may be repeated")
              ->option_text("SOURCE ..."),
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
          ->check(whole_number_in(1, kMaxSweepExperts))
          ->option_text("K"),
      command.add_option("--experts", shape.experts, "activation: default 256")
          ->check(whole_number_in(1, kMaxSweepExperts))
          ->option_text("E"),
      command.add_option("--inter", shape.inter, "activation: columns of the result; default 2048")
          ->check(whole_number_in(128, int64_t{1} << 20U))
          ->option_text("I"),
      command
          .add_option("--tile", shape.tile,
                      "activation: rows of an expert are padded to a multiple; default 8")
          ->check(whole_number_in(1, kMaxTile))
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
              ->check(number_in(0, kMaxMilliseconds))
              ->option_text("MS"),
          command.add_option("--replays", sweep.replays, "Timed replays; default 9")
              ->check(whole_number_in(1, kMaxReplays))
              ->option_text("N"),
          add_commit(command, sweep.commit)};
}

void add_common(CLI::App& command, BenchArguments& arguments) {
  const auto take_format = [&arguments](const std::string& text) {
    arguments.formats.push_back(parse_format(text));
  };
  with_words(add_repeated(command, "--format", take_format,
                          fmt::format("May be repeated, or a list with commas; default all: {}",
                                      format_list()))
                 ->option_text("FORMAT,..."),
             format_list());
  add_parsed_into(command, "--dtype", parse_target_dtype, arguments.dtype,
                  "High-precision side: bf16 (default), fp16 or fp32")
      ->option_text("DTYPE");
  add_parsed_into(command, "--math", in_any_case(parse_math_mode), arguments.math,
                  "Arithmetic of quantization: exact (default) or fast")
      ->option_text("MODE");
  add_threads(command, arguments.num_threads);
}

}  // namespace

void add_bench(const Commands& commands) {
  CLI::App& command = add_command(
      commands, "bench", "Time quantization on this machine, checking results", kBenchExamples);
  BenchArguments& arguments = arguments_of(command, commands, run_bench);
  std::vector<Choice<std::string>> operations;
  for (const char* op : {"quantize", "dequantize", "amax", "relayout", "activation",
                         "group_quantize", "kv_cache", "shuffle", "pack_bits"}) {
    operations.push_back({op, op});
  }
  add_choice<std::string>(command, "OP", operations, arguments.op,
                          "quantize or dequantize, default both; with --device also amax, "
                          "relayout, activation, group_quantize, kv_cache, shuffle and pack_bits")
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
      add_min_time(command, arguments.min_seconds,
                   "Without --device: seconds of timed runs for each case; default 0.5");
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

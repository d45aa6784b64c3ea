// narrowfloat-bench allreduce: the fused all-reduce on CPU ranks, on virtual ranks of one GPU, or
// on GPUs. Every output of every rank is compared with the oracle's in the same run, and each
// fused pattern stands beside the plain all-reduce of its shape; a wrong byte is exit code 1.
#include <algorithm>

#include <fmt/format.h>

#include "bench_cli/allreduce_report.h"
#include "bench_cli/commands.h"
#include "cli_common/allreduce_names.h"
#include "cli_common/command_line.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kAllReduceExamples = R"(Examples:
  narrowfloat-bench allreduce --ranks 2 --shape 16x2880 --pattern all
  narrowfloat-bench allreduce --ranks 4 --shape 8x7168 --pattern nvfp4 --processes
  narrowfloat-bench allreduce --ranks 4 --shape 1x7168,128x7168 --pattern all --on virtual --json
  narrowfloat-bench allreduce --ranks 2 --shape 64x7168 --pattern nvfp4,fp8 --on gpus
  narrowfloat-bench allreduce --ranks 2 --shape 64x7168 --pattern all --on gpus --soak 100000
)";
constexpr int kSoakGroup = 32;  // fp8_group: columns that most rows are a multiple of.

[[noreturn]] void refuse(std::string_view message) {
  throw Error(ErrorKind::kInvalidArgument, std::string(message));
}

// ---- rows

AllReduceProblem problem_of(const AllReduceArguments& arguments,
                            const AllReduceArguments::Shape& shape, AllReducePattern pattern,
                            ScaleLayoutId layout, AllReduceAlgorithm algorithm) {
  AllReduceProblem problem{.tokens = shape.tokens,
                           .hidden = shape.hidden,
                           .element = arguments.setup.workspace.element,
                           .pattern = pattern,
                           .accumulation = arguments.accumulation,
                           .algorithm = algorithm};
  if (algorithm == AllReduceAlgorithm::kNccl) problem.exactness = AllReduceExactness::kFast;
  const bool is_moe =
      pattern == AllReducePattern::kMoeReduction || pattern == AllReducePattern::kMoeFinalize;
  if (is_moe) problem.moe_quantization = arguments.moe_quantization;
  const AllReduceQuantization quantization = quantization_of(problem);
  if (quantization == AllReduceQuantization::kFp8GroupUe8m0) problem.group = arguments.group;
  if (has_layouts(quantization)) problem.scale_layout = layout;
  return problem;
}

// Whether there is such a problem; where the user has named it, its error reaches him.
bool is_possible(const AllReduceArguments& arguments, const AllReduceProblem& problem) {
  try {
    static_cast<void>(RankTensors(problem, arguments.setup.ranks, 0));
    return true;
  } catch (const Error& error) {
    if (!arguments.has_all_patterns) {
      throw Error(error.kind(), fmt::format("--shape {}x{} --pattern {}: {}", problem.tokens,
                                            problem.hidden, name(problem.pattern), error.what()));
    }
    warn(fmt::format("{}x{} is left out: {}", problem.tokens, problem.hidden, error.what()));
    return false;
  }
}

// The plain all-reduce of a shape comes first. On GPUs each row is followed by the one of NCCL.
std::vector<AllReduceRow> rows_of(const AllReduceArguments& arguments) {
  const bool has_baselines = arguments.setup.place == RankPlace::kGpus &&
                             arguments.setup.workspace.use_nccl &&
                             arguments.algorithm != AllReduceAlgorithm::kNccl;
  std::vector<AllReducePattern> patterns = arguments.patterns;
  const auto plain = std::ranges::find(patterns, AllReducePattern::kAllReduce);
  if (plain != patterns.end()) patterns.erase(plain);
  patterns.insert(patterns.begin(), AllReducePattern::kAllReduce);
  std::vector<AllReduceRow> rows;
  for (const AllReduceArguments::Shape& shape : arguments.shapes) {
    for (const AllReducePattern pattern : patterns) {
      for (const ScaleLayoutId layout : arguments.layouts) {
        const AllReduceProblem problem =
            problem_of(arguments, shape, pattern, layout, arguments.algorithm);
        const bool is_known = std::ranges::any_of(
            rows, [&](const AllReduceRow& row) { return row.problem == problem; });
        if (is_known || !is_possible(arguments, problem)) continue;
        rows.push_back({problem});
        if (!has_baselines) continue;
        rows.push_back(
            {problem_of(arguments, shape, pattern, layout, AllReduceAlgorithm::kNccl), true});
      }
    }
  }
  return rows;
}

// Algorithms that are asked for by name take every message. `auto` keeps the capacities that a
// workspace has by itself, but without NCCL the two-shot takes all.
void set_capacities(AllReduceArguments& arguments) {
  int64_t most_bytes = 0;
  for (const AllReduceArguments::Shape& shape : arguments.shapes) {
    most_bytes = std::max(
        most_bytes, shape.tokens * shape.hidden * (bits(arguments.setup.workspace.element) / 8));
  }
  AllReduceWorkspaceOptions& options = arguments.setup.workspace;
  const AllReduceCapacities defaults = default_allreduce_capacities(arguments.setup.ranks);
  const AllReduceAlgorithm algorithm = arguments.algorithm;
  const bool is_soak = arguments.soak_calls > 0;
  const bool is_oneshot = algorithm == AllReduceAlgorithm::kOneShot || is_soak;
  const bool is_twoshot = algorithm == AllReduceAlgorithm::kTwoShot ||
                          algorithm == AllReduceAlgorithm::kReference || is_soak ||
                          arguments.setup.place != RankPlace::kGpus || !options.use_nccl;
  if (options.oneshot_bytes == 0 && is_oneshot) {
    options.oneshot_bytes = std::max(defaults.oneshot_bytes, most_bytes);
  }
  if (options.twoshot_bytes == 0 && is_twoshot) {
    options.twoshot_bytes = std::max(defaults.twoshot_bytes, most_bytes);
  }
  // Ranges of tokens are padded to one size.
  int64_t padding = 0;
  for (const AllReduceArguments::Shape& shape : arguments.shapes) {
    padding = std::max(padding, kMostAllReduceRanks * shape.hidden * 4);
  }
  options.nccl_bytes = std::max(defaults.twoshot_bytes, most_bytes + padding);
}

ExitCode exit_code_of(const MeasuredRows& measured) {
  ExitCode code = ExitCode::kDone;
  for (const RowResult& row : measured.rows) {
    const RankResult& slowest = row.slowest();
    if (slowest.status == RankResult::Status::kLeftOut || row.is_correct()) continue;
    if (row.is_measured()) return ExitCode::kFindings;
    code = exit_code(slowest.error);
  }
  return code;
}

// ---- soak

// The rank was killed, and all others have reported so within the deadline and a few seconds.
std::string kill_verdict(const AllReduceArguments& arguments, const SoakOutcome& outcome) {
  constexpr double kSlackSeconds = 5;
  constexpr int kKilled = 9;
  const auto killed = static_cast<size_t>(arguments.kill_rank);
  const double deadline = std::chrono::duration<double>(arguments.setup.workspace.deadline).count();
  for (size_t rank = 0; rank < outcome.ends.size(); ++rank) {
    const RankEnd& end = outcome.ends[rank];
    const double seconds = end.seconds - outcome.results[killed].kill_seconds;
    if (rank == killed) {
      if (end.signal != kKilled) return fmt::format("rank {} was not killed", rank);
    } else if (!end.is_reported) {
      return fmt::format("rank {} has ended without a report", rank);
    } else if (!end.has_failed || end.kind != ErrorKind::kDevice) {
      return fmt::format("rank {} has not noticed that rank {} is dead: {}", rank, killed,
                         end.has_failed ? end.message : "it has ended without an error");
    } else if (seconds > deadline + kSlackSeconds) {
      return fmt::format("rank {} has reported after {:.1f} s, the deadline is {:.1f} s", rank,
                         seconds, deadline);
    }
  }
  return "";
}

std::string soak_verdict(const SoakOutcome& outcome) {
  for (size_t body = 0; body < outcome.results.size(); ++body) {
    if (outcome.results[body].message[0] != 0) {
      return fmt::format("rank {}: {}", body, outcome.results[body].message);
    }
  }
  return "";
}

ExitCode run_soak_command(const AllReduceArguments& arguments) {
  const AllReduceArguments::Shape& shape = arguments.shapes.front();
  SoakOptions options{.calls = arguments.soak_calls,
                      .most_tokens = shape.tokens,
                      .hidden = shape.hidden,
                      .element = arguments.setup.workspace.element,
                      .patterns = {},
                      .kill_rank = arguments.kill_rank};
  for (const AllReducePattern pattern : arguments.patterns) {
    AllReduceArguments soaked = arguments;
    soaked.group = kSoakGroup;
    soaked.moe_quantization = AllReduceQuantization::kNone;
    const AllReduceProblem problem =
        problem_of(soaked, shape, pattern, ScaleLayoutId::kLinear, AllReduceAlgorithm::kAuto);
    if (is_possible(arguments, problem)) options.patterns.push_back(pattern);
  }
  if (options.patterns.empty()) refuse("no pattern is left that can have this shape");
  const SoakOutcome outcome = run_soak(arguments.setup, options);
  std::string verdict = soak_verdict(outcome);
  if (arguments.kill_rank >= 0) {
    if (verdict.empty()) verdict = kill_verdict(arguments, outcome);
  } else if (const auto failure = first_failure(arguments.setup, outcome.ends)) {
    throw Error(*failure);
  }
  if (!verdict.empty()) warn(escaped(verdict));
  print_soak(arguments, outcome, verdict);
  return verdict.empty() ? ExitCode::kDone : ExitCode::kFindings;
}

// ---- the command

void check_arguments(const AllReduceArguments& arguments) {
  const RankSetup& setup = arguments.setup;
  const bool has_processes =
      setup.place == RankPlace::kProcesses || setup.place == RankPlace::kGpus;
  if (setup.is_one_gpu && setup.place != RankPlace::kGpus) refuse("--one-gpu needs --on gpus");
  if (setup.workspace.transport != AllReduceTransport::kAuto && setup.place != RankPlace::kGpus) {
    refuse("--transport needs --on gpus: others have one way to reach each other");
  }
  if (arguments.kill_rank < 0) return;
  if (arguments.soak_calls == 0) refuse("--kill-rank needs --soak");
  if (!has_processes) refuse("--kill-rank needs ranks that are processes: --processes, --on gpus");
  if (arguments.kill_rank >= setup.ranks) {
    refuse(
        fmt::format("--kill-rank: expected 0 to {}, got {}", setup.ranks - 1, arguments.kill_rank));
  }
}

ExitCode run_allreduce(const AllReduceArguments& given) {
  // Ranks may use CUDA and NCCL, and processes get these variables from here.
  turn_multicast_off();
  AllReduceArguments arguments = given;
  if (arguments.has_processes) {
    if (arguments.setup.place != RankPlace::kThreads) refuse("--processes needs --on cpu");
    arguments.setup.place = RankPlace::kProcesses;
  }
  check_arguments(arguments);
  // NCCL refuses two ranks on one GPU.
  if (arguments.setup.is_one_gpu) arguments.setup.workspace.use_nccl = false;
  if (arguments.has_all_patterns) arguments.patterns = all_allreduce_patterns();
  set_capacities(arguments);
  if (arguments.soak_calls > 0) return run_soak_command(arguments);
  const std::vector<AllReduceRow> rows = rows_of(arguments);
  if (rows.empty()) refuse("no row is left: no pattern can have these shapes");
  const MeasuredRows measured = measure_rows(arguments.setup, rows, arguments.measure);
  print_rows(arguments, rows, measured);
  return exit_code_of(measured);
}

// ---- options

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  while (true) {
    const size_t comma = text.find(',');
    words.push_back(text.substr(0, comma));
    if (comma == std::string_view::npos) return words;
    text.remove_prefix(comma + 1);
  }
}

std::vector<AllReduceArguments::Shape> parse_shapes(const std::string& text) {
  constexpr int64_t kMostTokens = 1 << 20;
  std::vector<AllReduceArguments::Shape> shapes;
  for (const std::string_view word : words_of(text)) {
    const MatrixShape shape = parse_nonempty_shape(word);
    if (shape.rows > kMostTokens || shape.cols > kMostTokens) {
      refuse(fmt::format("got '{}', expected at most {} tokens and columns", word, kMostTokens));
    }
    shapes.push_back({shape.rows, shape.cols});
  }
  return shapes;
}

void take_patterns(AllReduceArguments& arguments, const std::string& text) {
  arguments.patterns.clear();
  for (const std::string_view word : words_of(text)) {
    if (word == "all") {
      arguments.has_all_patterns = true;
    } else {
      arguments.patterns.push_back(parse_allreduce_pattern(word));
    }
  }
}

std::vector<ScaleLayoutId> parse_layouts(const std::string& text) {
  if (text == "all") {
    return {ScaleLayoutId::kSwizzled128x4, ScaleLayoutId::kSwizzled8x4, ScaleLayoutId::kLinear};
  }
  std::vector<ScaleLayoutId> layouts;
  for (const std::string_view word : words_of(text)) layouts.push_back(parse_scale_layout(word));
  return layouts;
}

void add_problem_options(CLI::App& command, AllReduceArguments& arguments) {
  add_parsed_into(command, "--shape", parse_shapes, arguments.shapes,
                  "Tokens and columns of one rank's message; one case each")
      ->required()
      ->option_text("TxH,... REQUIRED");
  add_parsed(
      command, "--pattern", [](const std::string& text) { return text; },
      [&arguments](const std::string& text) { take_patterns(arguments, text); },
      fmt::format("allreduce (default), or more; all for those that the shape can have. One of {}",
                  allreduce_pattern_list()))
      ->option_text("PATTERN,...");
  add_choice<DType>(command, "--element",
                    {{"bf16", DType::kBF16}, {"f16", DType::kF16}, {"f32", DType::kF32}},
                    arguments.setup.workspace.element, "Element type: bf16 (default), f16 or f32")
      ->option_text("TYPE");
  add_parsed_into(command, "--layout", parse_layouts, arguments.layouts,
                  "Layouts of block scales, or all; default swizzled_128x4")
      ->option_text("LAYOUT,...");
  command.add_option("--group", arguments.group, "fp8_group: columns with one scale; default 128")
      ->option_text("G");
  add_parsed_into(command, "--moe-quantization", parse_allreduce_quantization,
                  arguments.moe_quantization,
                  "moe_reduction, moe_finalize: what the norm becomes; default none")
      ->option_text("NAME");
  add_parsed_into(command, "--algorithm", parse_allreduce_algorithm, arguments.algorithm,
                  "auto (default), oneshot, twoshot, nccl, nccl_exact or reference")
      ->option_text("NAME");
  add_choice<AllReduceAccumulation>(
      command, "--accumulate",
      {{"fp32", AllReduceAccumulation::kFp32}, {"element", AllReduceAccumulation::kElement}},
      arguments.accumulation, "Sums round once at the end (fp32, default) or after each rank")
      ->option_text("WHICH");
}

void add_rank_options(CLI::App& command, AllReduceArguments& arguments) {
  RankSetup& setup = arguments.setup;
  command.add_option("--ranks", setup.ranks, "Ranks, 1 to 8")
      ->required()
      ->check(whole_number_in(1, kMostAllReduceRanks))
      ->option_text("N REQUIRED");
  add_choice<RankPlace>(
      command, "--on",
      {{"cpu", RankPlace::kThreads}, {"virtual", RankPlace::kVirtual}, {"gpus", RankPlace::kGpus}},
      setup.place,
      "cpu (default), virtual: all ranks on one GPU, gpus: a process and a "
      "GPU for each rank")
      ->option_text("WHERE");
  command.add_flag("--processes", arguments.has_processes,
                   "CPU ranks are processes with shared memory instead of threads");
  command.add_flag("--one-gpu", setup.is_one_gpu, "gpus: all processes share the first GPU")
      ->option_text(" ");
  add_parsed(
      command, "--device",
      [](const std::string& text) {
        const Device device = parse_device(text);
        if (device.type == DeviceType::kCuda) return device.index;
        throw Error(ErrorKind::kInvalidArgument, "expected cuda:N; CPU ranks are --on cpu");
      },
      [&setup](int index) { setup.gpu = index; }, "virtual: the GPU; default cuda:0")
      ->option_text("DEVICE");
  add_choice<AllReduceTransport>(command, "--transport",
                                 {{"auto", AllReduceTransport::kAuto},
                                  {"cuda_ipc", AllReduceTransport::kCudaIpc},
                                  {"cuda_vmm", AllReduceTransport::kCudaVmm},
                                  {"none", AllReduceTransport::kNone}},
                                 setup.workspace.transport,
                                 "gpus: auto (default), cuda_ipc, cuda_vmm, or none: NCCL alone")
      ->option_text("NAME");
  command
      .add_flag_callback(
          "--no-nccl", [&setup] { setup.workspace.use_nccl = false; }, "gpus: without NCCL")
      ->option_text(" ");
}

}  // namespace

void add_allreduce(const Commands& commands) {
  CLI::App& command = add_command(commands, "allreduce",
                                  "Time the fused all-reduce on CPUs or GPUs, checking results",
                                  kAllReduceExamples);
  AllReduceArguments& arguments = arguments_of(command, commands, run_allreduce);
  add_rank_options(command, arguments);
  add_problem_options(command, arguments);
  AllReduceWorkspaceOptions& workspace = arguments.setup.workspace;
  const auto add_capacity = [&](const char* flag, int64_t& capacity, const char* help) {
    add_parsed(
        command, flag, parse_bytes,
        [&capacity](uint64_t size_bytes) { capacity = static_cast<int64_t>(size_bytes); }, help)
        ->option_text("BYTES");
  };
  add_capacity("--oneshot-bytes", workspace.oneshot_bytes,
               "Largest message of the one-shot; default by the number of ranks");
  add_capacity("--twoshot-bytes", workspace.twoshot_bytes, "The same for the two-shot");
  add_parsed(
      command, "--deadline",
      [](const std::string& text) {
        constexpr int64_t kMost = 3'600'000;
        return parse_count(text, 1, kMost, "milliseconds from 1 to 3600000");
      },
      [&workspace](int64_t ms) { workspace.deadline = std::chrono::milliseconds(ms); },
      "Longest wait for another rank in milliseconds; default 30000")
      ->option_text("MS");
  add_choice<bool>(command, "--pdl", {{"on", true}, {"off", false}},
                   arguments.measure.is_programmatic,
                   "GPU: programmatic dependent launch, off (default) or on")
      ->option_text("WHICH");
  command
      .add_option("--soak", arguments.soak_calls,
                  "Instead: so many calls of random tokens, patterns and algorithms, all compared")
      ->check(whole_number_in(1, int64_t{1} << 40U))
      ->option_text("CALLS");
  command
      .add_option("--kill-rank", arguments.kill_rank,
                  "With --soak: rank R kills itself; the others must report it in time")
      ->check(whole_number_in(0, kMostAllReduceRanks - 1))
      ->option_text("R");
  add_min_time(command, arguments.measure.min_seconds);
  add_commit(command, arguments.commit);
  add_output(command, arguments.output, CsvSupport::kYes);
}

}  // namespace narrowfloat::cli

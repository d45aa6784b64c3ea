// narrowfloat-bench moe gemm: the time of one grouped GEMM of random weights and rows, and a sample
// of its rows compared with fp64 sums of the same codes. Rows are sorted by group as in a layer,
// padded to the token tile, and in the mode's format from the start. Weights and rows are made
// where they are multiplied; the few that a check needs are made again on the host. A result
// outside of its tolerance is exit code 1.
#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "bench_cli/commands.h"
#include "bench_cli/measure.h"
#include "cli_common/command_line.h"
#include "cli_common/host_memory.h"
#include "cli_common/moe/layer_inputs.h"
#include "cli_common/moe/layer_options.h"
#include "cli_common/moe/random_weights.h"
#include "cli_common/output.h"
#include "narrowfloat/moe.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kGemmExamples = R"(Examples:
  narrowfloat-bench moe gemm --shape 1024,512,8 --rows 16,256 --mode mxfp4_bf16
  narrowfloat-bench moe gemm --shape 4096,7168,8 --rows 16384 --device cuda
)";
constexpr int64_t kCheckedRows = 8;

// One grouped GEMM: rows [rows, k] times weights [groups, n, k]. Rows are spread evenly over the
// groups.
struct GemmShape {
  int64_t n = 0;
  int64_t k = 0;
  int32_t groups = 0;
};

struct MoeGemmArguments {
  OutputArguments output;
  Device device;
  GemmShape shape;
  std::vector<int64_t> rows;
  MoeMode mode = MoeMode::kFp8Block;
  std::optional<int32_t> token_tile;
  int num_threads = 0;
  double min_seconds = 0.5;
  std::string commit;
};

struct GemmProblem {
  GemmShape shape;
  MoeMode mode = MoeMode::kFp8Block;
  int64_t rows = 0;
  std::optional<int32_t> token_tile;  // Default: default_token_tile().
  double min_seconds = 0.5;
};

struct GemmResult {
  int32_t token_tile = 0;
  std::string implementation;
  CallTime time;
  double weight_bytes = 0;  // Those of the groups that have rows.
  double flops = 0;
  CheckedRun check;
};

// ---- measurement

std::vector<int32_t> counted(int64_t count) {
  std::vector<int32_t> numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// The group of each row: the first ones have one more where they do not divide evenly.
std::vector<int32_t> groups_of_rows(int64_t rows, int32_t groups) {
  std::vector<int32_t> ids;
  for (int32_t group = 0; group < groups; ++group) {
    ids.insert(ids.end(), static_cast<size_t>(rows / groups + (group < rows % groups ? 1 : 0)),
               group);
  }
  return ids;
}

// Quantized rows that were made as experts of one row each.
CodedRows quantized_rows(const WeightView& made, std::vector<float>& row_scale, MoeMode mode) {
  const int64_t rows = made.values.shape[0];
  CodedRows quantized;
  quantized.values = TensorView::contiguous(made.values.data, made.values.dtype,
                                            {rows, made.values.shape[2]}, made.values.device);
  const ScaleView& scales = made.scales;
  if (scales.data != nullptr) {
    const DType dtype = scales.type == ScaleType::kF32 ? DType::kF32 : DType::kU8;
    quantized.scales =
        TensorView::contiguous(scales.data, dtype, {rows, scales.blocks}, scales.device);
  }
  const RowFormat format = moe_mode_info(mode).input;
  if (format == RowFormat::kNvfp4PerToken || format == RowFormat::kFp8Token) {
    row_scale.assign(static_cast<size_t>(rows), 1.0F);
    quantized.row_scale = TensorView::contiguous(row_scale.data(), DType::kF32, {rows});
  }
  return quantized;
}

GroupedWeights prepare_on(Machine& machine, const GemmProblem& problem) {
  const GemmShape& shape = problem.shape;
  const RandomWeights made(problem.mode, shape.n, shape.k, counted(shape.groups));
  MoeWeights weights = made.weights();
  Transfer transfer(machine);
  // Scales of four bytes are made on the host.
  transfer.add(weights.w1.scales);
  for (const RandomTensor& tensor : made.tensors()) transfer.add(tensor, weights);
  transfer.send();
  machine.wait();
  return GroupedWeights::prepare(weights.w1, problem.mode, machine.device());
}

// The operands of a call, in the machine's memory.
class Operands {
 public:
  Operands(Machine& machine, const GemmProblem& problem, const GroupedWeights& weights,
           const PermutationLayout& layout)
      : machine_(machine),
        problem_(problem),
        groups_(groups_of_rows(problem.rows, problem.shape.groups)),
        made_(moe_mode_info(problem.mode).input, problem.shape.k, counted(layout.max_rows)) {
    MoeWeights rows = made_.weights();
    ids_ = TensorView::contiguous(groups_.data(), DType::kI32, {problem.rows, 1});
    std::byte* permutation = nullptr;
    std::byte* workspace = nullptr;
    const int64_t workspace_bytes =
        grouped_gemm_workspace(weights, layout.max_rows, Accumulation::kFp32);
    out_bytes_ = static_cast<uint64_t>(layout.max_rows * problem.shape.n * 2);
    CodedRows quantized = quantized_rows(rows.w1, row_scale_, problem.mode);
    Transfer transfer(machine);
    transfer.add(ids_);
    transfer.add(rows.w1.scales);
    transfer.add(quantized.row_scale);
    for (const RandomTensor& tensor : made_.tensors()) transfer.add(tensor, rows);
    transfer.add_buffer(out_, out_bytes_);
    transfer.add_buffer(permutation, static_cast<uint64_t>(layout.bytes));
    transfer.add_buffer(workspace, static_cast<uint64_t>(workspace_bytes));
    transfer.send();
    const TensorView row_scales = quantized.row_scale;
    args_.a = quantized_rows(rows.w1, row_scale_, problem.mode);
    args_.a.row_scale = row_scales;
    args_.permutation = layout.bind(permutation, machine.device());
    args_.output = TensorView::contiguous(out_, DType::kBF16, {layout.max_rows, problem.shape.n},
                                          machine.device());
    workspace_ = TensorView::contiguous(workspace, DType::kU8, {workspace_bytes}, machine.device());
  }

  void sort_rows() {
    machine_.run_once([&](int64_t /*call*/, Stream stream) {
      permute(ids_, 0, problem_.shape.groups, args_.permutation, stream);
    });
  }
  void multiply(const GroupedWeights& weights, Stream stream) const {
    grouped_gemm(args_, weights, workspace_, stream);
  }
  void poison() { machine_.fill_bytes(out_, kPoison, out_bytes_); }

  // The rows that the permutation gave these slots.
  [[nodiscard]] std::vector<int32_t> rows_of(const std::vector<int64_t>& slots) const {
    std::vector<int32_t> map(static_cast<size_t>(problem_.rows));
    machine_.read(reinterpret_cast<std::byte*>(map.data()),
                  static_cast<const std::byte*>(args_.permutation.slot_to_row.data),
                  map.size() * sizeof(int32_t));
    std::vector<int32_t> rows;
    rows.reserve(slots.size());
    for (const int64_t slot : slots) rows.push_back(map[static_cast<size_t>(slot)]);
    return rows;
  }
  [[nodiscard]] std::vector<float> output_of(const std::vector<int32_t>& rows) const {
    const auto row_bytes = static_cast<size_t>(problem_.shape.n) * 2;
    std::vector<std::byte> stored(rows.size() * row_bytes);
    for (size_t i = 0; i < rows.size(); ++i) {
      machine_.read(stored.data() + i * row_bytes, out_ + static_cast<size_t>(rows[i]) * row_bytes,
                    row_bytes);
    }
    return to_floats(stored, DType::kBF16);
  }

 private:
  Machine& machine_;
  const GemmProblem& problem_;
  std::vector<int32_t> groups_;  // These two stay: views of the host are views of them.
  std::vector<float> row_scale_;
  RandomWeights made_;
  TensorView ids_;
  GroupedGemmArgs args_;
  std::byte* out_ = nullptr;
  uint64_t out_bytes_ = 0;
  TensorView workspace_;
};

// At most kCheckedRows slots, evenly spread, the last one among them.
std::vector<int64_t> sampled_slots(int64_t rows) {
  const int64_t count = std::min(rows, kCheckedRows);
  std::vector<int64_t> slots;
  for (int64_t i = 1; i <= count; ++i) slots.push_back(i * rows / count - 1);
  return slots;
}

// fp64 sums of the rows with the weights of their groups, on the CPU.
std::vector<float> expected_output(const GemmProblem& problem, const std::vector<int64_t>& slots,
                                   const std::vector<int32_t>& rows) {
  const std::vector<int32_t> all = groups_of_rows(problem.rows, problem.shape.groups);
  std::vector<int32_t> groups;
  std::vector<int32_t> ids;
  for (const int64_t slot : slots) {
    const int32_t group = all[static_cast<size_t>(slot)];
    if (groups.empty() || groups.back() != group) groups.push_back(group);
    ids.push_back(static_cast<int32_t>(groups.size()) - 1);
  }
  const GemmShape& shape = problem.shape;
  const auto count = static_cast<int64_t>(slots.size());
  const auto num_groups = static_cast<int32_t>(groups.size());
  RandomWeights made(problem.mode, shape.n, shape.k, groups);
  made.fill();
  const GroupedWeights weights = GroupedWeights::prepare(made.weights().w1, problem.mode);
  RandomWeights made_rows(moe_mode_info(problem.mode).input, shape.k, rows);
  made_rows.fill();
  const PermutationLayout layout = permutation_layout(count, 1, num_groups, 1);
  AlignedBytes buffer(layout.bytes);
  AlignedBytes workspace(grouped_gemm_workspace(weights, count, Accumulation::kFp64));
  std::vector<double> sums(static_cast<size_t>(count * shape.n));
  std::vector<float> row_scale;
  GroupedGemmArgs args;
  args.a = quantized_rows(made_rows.weights().w1, row_scale, problem.mode);
  args.accumulation = Accumulation::kFp64;
  args.permutation = layout.bind(buffer.view().data);
  args.output = TensorView::contiguous(sums.data(), DType::kF64, {count, shape.n});
  // The ids are sorted already, so row i of the result is that of slot i.
  permute(TensorView::contiguous(ids.data(), DType::kI32, {count, 1}), 0, num_groups,
          args.permutation);
  grouped_gemm(args, weights, workspace.view());
  return {sums.begin(), sums.end()};
}

CheckedRun check_gemm(const GemmProblem& problem, const Operands& operands) {
  const std::vector<int64_t> slots = sampled_slots(problem.rows);
  const std::vector<int32_t> rows = operands.rows_of(slots);
  CheckedRun check;
  check.tokens = static_cast<int64_t>(slots.size());
  check.error =
      distance(operands.output_of(rows), expected_output(problem, slots, rows), problem.shape.n);
  const Distance limit = tolerance(problem.mode);
  check.verdict = check.error.row <= limit.row ? Verdict::kCorrect : Verdict::kWrong;
  return check;
}

GemmResult measure_gemm(Machine& machine, const GemmProblem& problem) {
  const GemmShape& shape = problem.shape;
  GemmResult result;
  result.token_tile =
      problem.token_tile.value_or(default_token_tile(problem.rows, 1, shape.groups));
  const GroupedWeights weights = prepare_on(machine, problem);
  result.implementation = weights.implementation();
  const PermutationLayout layout =
      permutation_layout(problem.rows, 1, shape.groups, result.token_tile);
  Operands operands(machine, problem, weights, layout);
  operands.sort_rows();
  const auto call = [&](int64_t /*call*/, Stream stream) { operands.multiply(weights, stream); };
  machine.run_once(call);
  const double once_us = std::max(machine.run_once(call), 1.0);
  const int64_t calls = calls_per_replay(once_us);
  operands.poison();
  result.time = machine.time_calls(
      call, machine.plan_for(problem.min_seconds, calls, once_us * static_cast<double>(calls)));
  const auto hit = static_cast<double>(std::min<int64_t>(shape.groups, problem.rows));
  const auto elements = static_cast<double>(shape.n * shape.k);
  result.weight_bytes = hit * elements * moe_mode_info(problem.mode).bits_per_weight / 8;
  result.flops = 2 * static_cast<double>(problem.rows) * elements;
  result.check = check_gemm(problem, operands);
  return result;
}

// ---- report

struct GemmReport {
  MachineFacts facts;
  MachineRates rates;
  std::vector<std::pair<GemmProblem, GemmResult>> cases;
};

bool is_correct(const GemmResult& result) { return result.check.verdict == Verdict::kCorrect; }

double rate_of(double amount, const GemmResult& result) {
  return billions_per_second(amount, result.time.median_us * 1e-6);
}

Json case_json(const GemmProblem& problem, const GemmResult& result) {
  const CallTime& time = result.time;
  const Distance& error = result.check.error;
  return Json{
      {"mode", name(problem.mode)},
      {"implementation", result.implementation},
      {"n", problem.shape.n},
      {"k", problem.shape.k},
      {"groups", problem.shape.groups},
      {"rows", problem.rows},
      {"token_tile", result.token_tile},
      {"median_us", time.median_us},
      {"p10_us", time.p10_us},
      {"p90_us", time.p90_us},
      {"calls", time.calls},
      {"replays", time.replays},
      {"weight_bytes", result.weight_bytes},
      {"flops", result.flops},
      {"weight_gb_per_second", rate_of(result.weight_bytes, result)},
      {"gflop_per_second", rate_of(result.flops, result)},
      {"checked_rows", result.check.tokens},
      {"error_to_fp64", Json{{"rel", json_number(error.rel)}, {"row", json_number(error.row)}}},
      {"correct", is_correct(result)}};
}

void print_document(const MoeGemmArguments& arguments, const GemmReport& report) {
  Json document = json_document("moe gemm");
  document["version"] = version();
  document["commit"] = arguments.commit;
  document["cpu"] = cpu_info().model;
  document["threads"] = num_threads();
  document["device"] = to_string(arguments.device);
  if (arguments.device.type != DeviceType::kCpu) {
    document["gpu"] = machine_json(report.facts, arguments.device);
    document["rates"] = rates_json(report.rates);
  }
  document["environment"] = environment_settings();
  document["min_seconds"] = arguments.min_seconds;
  document["cases"] = Json::array();
  for (const auto& [problem, result] : report.cases) {
    document["cases"].push_back(case_json(problem, result));
  }
  print_json(document);
}

// The table is printed as text and as CSV: the names of the columns carry the units.
Table case_table(const GemmReport& report) {
  using enum Table::Align;
  Table table({{"mode", kLeft},
               {"implementation", kLeft},
               {"n", kRight},
               {"k", kRight},
               {"groups", kRight},
               {"rows", kRight},
               {"tile", kRight},
               {"median_us", kRight},
               {"p10_p90_us", kRight},
               {"weights_gb_per_s", kRight},
               {"gflop_per_s", kRight},
               {"row_fp64", kRight},
               {"result", kLeft}});
  for (const auto& [problem, result] : report.cases) {
    table.add_row(
        {std::string(name(problem.mode)), result.implementation, std::to_string(problem.shape.n),
         std::to_string(problem.shape.k), std::to_string(problem.shape.groups),
         std::to_string(problem.rows), std::to_string(result.token_tile),
         fmt::format("{:.1f}", result.time.median_us),
         fmt::format("{:.1f}-{:.1f}", result.time.p10_us, result.time.p90_us),
         fmt::format("{:.1f}", rate_of(result.weight_bytes, result)),
         fmt::format("{:.1f}", rate_of(result.flops, result)),
         fmt::format("{:.2e}", result.check.error.row), is_correct(result) ? "correct" : "WRONG"},
        is_correct(result) ? Tone::kPlain : Tone::kBad);
  }
  return table;
}

void print_report(const MoeGemmArguments& arguments, const GemmReport& report) {
  switch (arguments.output.data) {
    case DataFormat::kJson:
      return print_document(arguments, report);
    case DataFormat::kCsv:
      return write_stdout(case_table(report).to_csv());
    case DataFormat::kTable:
      if (arguments.output.is_quiet) return;
      write_stdout(fmt::format("{}: {}\n\n", to_string(arguments.device), report.facts.name));
      return write_stdout(case_table(report).to_text(is_colored(arguments.output.color)));
  }
}

ExitCode run_moe_gemm(const MoeGemmArguments& arguments) {
  set_num_threads(arguments.num_threads);
  const std::unique_ptr<Machine> machine = open_machine(arguments.device);
  GemmReport report;
  report.facts = machine->facts();
  if (!machine->is_host()) report.rates = measure_rates(*machine);
  ExitCode code = ExitCode::kDone;
  for (const int64_t rows : arguments.rows) {
    const GemmProblem problem{.shape = arguments.shape,
                              .mode = arguments.mode,
                              .rows = rows,
                              .token_tile = arguments.token_tile,
                              .min_seconds = arguments.min_seconds};
    report.cases.emplace_back(problem, measure_gemm(*machine, problem));
    if (!is_correct(report.cases.back().second)) code = ExitCode::kFindings;
  }
  print_report(arguments, report);
  return code;
}

GemmShape parse_gemm_shape(const std::string& text) {
  constexpr int64_t kMaxExtent = 1 << 20;
  constexpr int64_t kMaxGroups = 4096;
  constexpr std::string_view kExpected =
      "three numbers N,K,G such as 4096,7168,8: rows and columns of a group's weights, groups";
  const std::vector<int64_t> numbers = parse_count_list(text, kMaxExtent, kExpected);
  if (numbers.size() == 3 && numbers[2] <= kMaxGroups) {
    return {numbers[0], numbers[1], static_cast<int32_t>(numbers[2])};
  }
  throw Error(ErrorKind::kInvalidArgument, fmt::format("got '{}', expected {}", text, kExpected));
}

}  // namespace

void add_moe_gemm(const Commands& commands) {
  CLI::App& command = add_command(
      commands, "gemm", "Time one grouped GEMM of random weights, checking results", kGemmExamples);
  MoeGemmArguments& arguments = arguments_of(command, commands, run_moe_gemm);
  add_parsed_into(command, "--shape", parse_gemm_shape, arguments.shape,
                  "N,K,G: weights of G groups, [N, K] each")
      ->required()
      ->option_text("N,K,G REQUIRED");
  add_parsed_into(command, "--rows", parse_token_list, arguments.rows,
                  "Rows of all groups together, spread evenly; one case each")
      ->required()
      ->option_text("M,... REQUIRED");
  add_parsed_into(command, "--mode", in_any_case(parse_moe_mode), arguments.mode,
                  fmt::format("Default fp8_block; of {}", mode_list()))
      ->option_text("MODE");
  add_token_tile(command, arguments.token_tile);
  add_commit(command, arguments.commit);
  add_checked_device(command, arguments.device);
  add_threads(command, arguments.num_threads);
  add_min_time(command, arguments.min_seconds);
  add_output(command, arguments.output, CsvSupport::kYes);
}

}  // namespace narrowfloat::cli

// Rows are sorted by group as in a layer, padded to the token tile, and in the mode's format from
// the start. Weights and rows are made where they are multiplied; the few that a check needs are
// made again on the host.
#include "cli/moe/gemm_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "cli/float_tensors.h"
#include "cli/moe/layer_runner.h"
#include "cli/moe/random_layer.h"
#include "cli/moe/transfer.h"

namespace narrowfloat::cli {
namespace {

constexpr int64_t kCheckedRows = 8;
// Of a graph.
constexpr double kGraphUs = 3000;
constexpr int64_t kMaxCalls = 256;
constexpr int kMinGemmReplays = 5;
constexpr int kMaxGemmReplays = 1000;
constexpr uint8_t kGemmPoison = 0xFF;

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

// Rows that were made as experts of one row each.
CodedRows coded_rows(const WeightView& made, std::vector<float>& row_scale, MoeMode mode) {
  const int64_t rows = made.values.shape[0];
  CodedRows coded;
  coded.values = TensorView::contiguous(made.values.data, made.values.dtype,
                                        {rows, made.values.shape[2]}, made.values.device);
  const ScaleView& scales = made.scales;
  if (scales.data != nullptr) {
    const DType dtype = scales.type == ScaleType::kF32 ? DType::kF32 : DType::kU8;
    coded.scales = TensorView::contiguous(scales.data, dtype, {rows, scales.blocks}, scales.device);
  }
  if (moe_mode_info(mode).input == RowFormat::kNvfp4PerToken) {
    row_scale.assign(static_cast<size_t>(rows), 1.0F);
    coded.row_scale = TensorView::contiguous(row_scale.data(), DType::kF32, {rows});
  }
  return coded;
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

// What a call reads and writes, in the machine's memory.
class Operands {
 public:
  Operands(Machine& machine, const GemmProblem& problem, const GroupedWeights& weights,
           const PermutationLayout& layout)
      : machine_(machine),
        problem_(problem),
        made_(moe_mode_info(problem.mode).input, problem.shape.k, counted(layout.max_rows)) {
    MoeWeights rows = made_.weights();
    std::vector<int32_t> ids = groups_of_rows(problem.rows, problem.shape.groups);
    ids_ = TensorView::contiguous(ids.data(), DType::kI32, {problem.rows, 1});
    std::byte* permutation = nullptr;
    std::byte* workspace = nullptr;
    const int64_t workspace_bytes =
        grouped_gemm_workspace(weights, layout.max_rows, Accumulation::kFp32);
    out_bytes_ = static_cast<uint64_t>(layout.max_rows * problem.shape.n * 2);
    std::vector<float> row_scale;
    CodedRows coded = coded_rows(rows.w1, row_scale, problem.mode);
    Transfer transfer(machine);
    transfer.add(ids_);
    transfer.add(rows.w1.scales);
    transfer.add(coded.row_scale);
    for (const RandomTensor& tensor : made_.tensors()) transfer.add(tensor, rows);
    transfer.add_buffer(out_, out_bytes_);
    transfer.add_buffer(permutation, static_cast<uint64_t>(layout.bytes));
    transfer.add_buffer(workspace, static_cast<uint64_t>(workspace_bytes));
    transfer.send();
    const TensorView row_scales = coded.row_scale;
    args_.a = coded_rows(rows.w1, row_scale, problem.mode);
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
  void poison() { machine_.fill_bytes(out_, kGemmPoison, out_bytes_); }

  // Where the permutation put these slots.
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
  RandomWeights made_;
  TensorView ids_;
  GroupedGemmArgs args_;
  std::byte* out_ = nullptr;
  uint64_t out_bytes_ = 0;
  TensorView workspace_;
};

// Evenly spread, the last one among them.
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
  args.a = coded_rows(made_rows.weights().w1, row_scale, problem.mode);
  args.accumulation = Accumulation::kFp64;
  args.permutation = layout.bind(buffer.view().data);
  args.output = TensorView::contiguous(sums.data(), DType::kF64, {count, shape.n});
  // Sorted already: row i of the result is that of slot i.
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

}  // namespace

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
  const auto calls = static_cast<int64_t>(
      std::clamp(std::ceil(kGraphUs / once_us), 1.0, static_cast<double>(kMaxCalls)));
  const double wanted = problem.min_seconds * 1e6 / (once_us * static_cast<double>(calls));
  operands.poison();
  result.time = machine.time_calls(
      call, {.calls = calls,
             .replays = static_cast<int>(std::clamp(wanted, static_cast<double>(kMinGemmReplays),
                                                    static_cast<double>(kMaxGemmReplays))),
             .is_programmatic = machine.facts().has_programmatic_launch});
  const auto hit = static_cast<double>(std::min<int64_t>(shape.groups, problem.rows));
  const auto elements = static_cast<double>(shape.n * shape.k);
  result.weight_bytes = hit * elements * moe_mode_info(problem.mode).bits_per_weight / 8;
  result.flops = 2 * static_cast<double>(problem.rows) * elements;
  result.check = check_gemm(problem, operands);
  return result;
}

}  // namespace narrowfloat::cli

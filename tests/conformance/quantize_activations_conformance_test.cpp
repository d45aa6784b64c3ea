// Every implementation that quantizes activation rows, in every row format and from every plain
// type, against the CPU's: all rows, gathered ones, listed ones, multipliers per expert, maps with
// rows that do not exist.
#include <algorithm>
#include <optional>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/int_math.h"
#include "conformance/case_sampling.h"
#include "conformance/coverage.h"
#include "conformance/row_combination.h"
#include "moe_shared/quantize_activations_problem.h"
#include "narrowfloat/error.h"
#include "support/device_copies.h"
#include "support/environment.h"
#include "support/rows_tensor.h"
#include "support/tensors.h"
#include "tensor/row_format.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kQuantizeActivationsCases = 60;
constexpr std::string_view kQuantizeActivationsOracle = "cpu_baseline";
constexpr int64_t kQuantizeActivationsExperts = 5;

struct RowsCase {
  uint64_t seed = 0;
  RowFormat format = RowFormat::kFp8Group;
  DType input = DType::kBF16;
  RowChoice choice = RowChoice::kAll;
  int64_t input_rows = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  Fill fill = Fill::kNormal;
  bool per_expert = false;
  int32_t token_tile = 8;
};

std::string to_string(const RowsCase& c) {
  return fmt::format("{} {}x{} -> {} {} rows, choice {}, {}{}", name(c.input), c.input_rows, c.cols,
                     name(c.format), c.rows, static_cast<int>(c.choice), name(c.fill),
                     c.per_expert ? " per expert" : "");
}

RowsCase sample_activations(RowFormat format, DType input, uint64_t seed) {
  Random random(seed);
  RowsCase c{.seed = seed, .format = format, .input = input};
  c.choice = random.pick({RowChoice::kAll, RowChoice::kGathered, RowChoice::kListed});
  c.input_rows = random.pick<int64_t>({0, 1, 1, 2, 3, 7, 8, 9, 33, 64});
  // The columns that modes allow (moe spec 1.2).
  const int64_t multiple = std::max<int64_t>(column_multiple(format), 16);
  c.cols = random.chance(60) ? sample_cols(random, multiple) : multiple * random.range(0, 20);
  while (c.input_rows * c.cols > 30000) c.input_rows /= 2;
  c.rows = c.choice == RowChoice::kGathered ? random.range(0, 2 * c.input_rows) : c.input_rows;
  c.fill = static_cast<Fill>(random.range(0, kNumFills - 1));
  c.per_expert = has_static_multiplier(format) && random.chance(50);
  c.token_tile = 1 << random.range(0, 5);
  return c;
}

struct QuantizeActivationsInputs {
  GuardedBuffer values;
  Vector multipliers;
  Vector tiles;
  Vector map;
  QuantizeActivationsArgs args;
};

// Sources of the output's rows, or a list of some of them in any order; entries may be missing.
std::vector<int32_t> sample_map(const RowsCase& c, Random& random) {
  std::vector<int32_t> map;
  for (int64_t row = 0; row < c.rows; ++row) {
    const bool is_list = c.choice == RowChoice::kListed;
    map.push_back(static_cast<int32_t>(is_list ? row : random.range(0, c.input_rows - 1)));
    if (is_list) std::swap(map.back(), map[static_cast<size_t>(random.range(0, row))]);
  }
  for (int32_t& row : map) {
    if (random.chance(30)) row = -1;
  }
  if (c.choice == RowChoice::kListed) map.resize(static_cast<size_t>(random.range(0, c.rows)));
  return map;
}

QuantizeActivationsInputs make_activations_inputs(const RowsCase& c, const BufferStyle& style) {
  QuantizeActivationsInputs inputs;
  Random random(c.seed + 1);
  QuantizeActivationsArgs& args = inputs.args;
  inputs.values = GuardedBuffer(c.input_rows * c.cols * bits(c.input) / 8, style);
  fill_elements(c.fill, c.input, random, c.input_rows * c.cols, inputs.values.data());
  args.rows = TensorView::contiguous(inputs.values.data(), c.input, {c.input_rows, c.cols});
  args.format = c.format;
  args.choice = c.choice;
  if (c.choice != RowChoice::kAll) {
    inputs.map = Vector::of(DType::kI32, sample_map(c, random));
    args.map = inputs.map.view();
  }
  const auto multiplier = [&] { return 0.1F + std::abs(300.0F * random.normal()); };
  if (has_static_multiplier(c.format)) args.multiplier = multiplier();
  if (!c.per_expert) return inputs;
  std::vector<float> each;
  for (int64_t i = 0; i < kQuantizeActivationsExperts; ++i) each.push_back(multiplier());
  inputs.multipliers = Vector::of(DType::kF32, each);
  args.multiplier = PerExpert(inputs.multipliers.view());
  inputs.tiles = Vector(DType::kI32, ceil_div(c.rows, c.token_tile));
  for (int32_t& expert : inputs.tiles.buffer().span<int32_t>()) {
    expert = static_cast<int32_t>(random.range(0, kQuantizeActivationsExperts - 1));
  }
  args.tile_to_expert = inputs.tiles.view();
  args.token_tile = c.token_tile;
  return inputs;
}

// The call with its views on the device.
QuantizeActivationsArgs moved_call(const QuantizeActivationsArgs& host,
                                   const DeviceCopies& device) {
  QuantizeActivationsArgs args = host;
  args.rows = device.view(host.rows);
  args.multiplier = device.view(host.multiplier);
  args.map = device.view(host.map);
  args.tile_to_expert = device.view(host.tile_to_expert);
  args.output = device.view(host.output);
  return args;
}

// Empty where the implementation refuses.
std::optional<std::vector<uint8_t>> run_quantize_activations(const RowsCase& c,
                                                             std::string_view impl, Guard guard,
                                                             std::string* refusal = nullptr) {
  const BufferStyle style{.poison = 0xFF, .guard = guard};
  QuantizeActivationsInputs inputs = make_activations_inputs(c, style);
  const RowsTensor output(c.format, c.rows, c.cols, style);
  inputs.args.output = output.view;
  const DeviceCopies device(
      {&inputs.values, &inputs.multipliers.buffer(), &inputs.tiles.buffer(), &inputs.map.buffer(),
       &output.values, &output.scales, &output.row_scale},
      {.on_host = !is_for_device(impl), .programmatic_launch = guard == Guard::kPage});
  const ForcedImplementation forced("quantize_activations", impl);
  try {
    quantize_activations(moved_call(inputs.args, device), device.stream());
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUnsupported) throw;
    if (refusal != nullptr) *refusal = error.what();
    return std::nullopt;
  }
  EXPECT_TRUE(device.take_back());
  EXPECT_TRUE(output.intact() && inputs.values.intact());
  return output.bytes();
}

std::vector<RowCombination> quantize_activations_combinations() {
  std::vector<RowCombination> all;
  for (const RowFormat format :
       {RowFormat::kFp8Static, RowFormat::kFp8Group, RowFormat::kMxfp8, RowFormat::kNvfp4,
        RowFormat::kNvfp4PerToken, RowFormat::kFp8Token}) {
    for (const DType input : {DType::kF32, DType::kF16, DType::kBF16}) {
      all.emplace_back(format, input);
    }
  }
  return all;
}

class QuantizeActivationsConformance : public DeviceTest<RowCombination> {};

TEST_P(QuantizeActivationsConformance, EveryImplementationGivesTheOraclesBytes) {
  Coverage coverage;
  for_cases(kQuantizeActivationsCases, [&](int64_t index) {
    const auto [format, input] = GetParam();
    const RowsCase c = sample_activations(
        format, input, case_seed("quantize_activations" + row_combination_name(GetParam()), index));
    const auto oracle =
        run_quantize_activations(c, kQuantizeActivationsOracle, Guard::kCanary).value();
    for (const QuantizeActivationsImpl& impl : quantize_activations_impls()) {
      if (!is_for_device(impl.name)) continue;
      const std::string note =
          repro_line("quantize_activations", impl.name, index) + "\n  " + to_string(c);
      set_crash_note(note.c_str());
      for (const Guard guard : {Guard::kCanary, Guard::kPage}) {
        std::string refusal;
        const auto output = run_quantize_activations(c, impl.name, guard, &refusal);
        output ? coverage.ran(impl.name) : coverage.refused(impl.name, refusal);
        EXPECT_TRUE(!output || *output == oracle) << note;
      }
    }
    coverage.end_case(true, to_string(c));
  });
  coverage.report(row_combination_name(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(All, QuantizeActivationsConformance,
                         ::testing::ValuesIn(quantize_activations_combinations()),
                         [](const auto& test) { return row_combination_name(test.param); });

}  // namespace
}  // namespace narrowfloat::testing

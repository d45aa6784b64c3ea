// Every implementation of activate, in every row format and from every input type, against the
// oracle: all kinds and gate orders, values per expert, column-major scales, rows that no slot
// names.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/host_device.h"
#include "base/int_math.h"
#include "conformance/case_sampling.h"
#include "conformance/coverage.h"
#include "conformance/row_combination.h"
#include "narrowfloat/error.h"
#include "ops/activation/activation_problem.h"
#include "support/device_copies.h"
#include "support/environment.h"
#include "support/rows_tensor.h"
#include "support/tensors.h"
#include "tensor/row_format.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kActivationCases = 60;
constexpr int64_t kActivationExperts = 5;

struct ActivationCase {
  uint64_t seed = 0;
  RowFormat format = RowFormat::kBf16;
  DType input = DType::kF32;
  ActivationKind kind = ActivationKind::kSwiglu;
  GateOrder order = GateOrder::kUpGate;
  int64_t rows = 0;
  int64_t inter = 0;
  Fill fill = Fill::kNormal;
  ScaleOrder scale_order = ScaleOrder::kRowsFirst;
  bool per_expert = false;
  bool has_num_rows = false;
  bool has_inverse_map = false;
  int32_t token_tile = 8;
  int64_t misalignment = 0;

  [[nodiscard]] int64_t input_cols() const {
    return activation_info(kind).is_gated ? 2 * inter : inter;
  }
};

std::string to_string(const ActivationCase& c) {
  return fmt::format("{} {} {} {}x{} -> {} {}{}{}", name(c.kind), name(c.order), name(c.input),
                     c.rows, c.input_cols(), name(c.format), name(c.fill),
                     c.per_expert ? " per expert" : "", c.has_num_rows ? " num_rows" : "");
}

ActivationCase sample_activation(RowFormat format, DType input, uint64_t seed) {
  Random random(seed);
  ActivationCase c{.seed = seed, .format = format, .input = input};
  c.kind = random.pick(all_activations()).id;
  c.order = random.pick({GateOrder::kUpGate, GateOrder::kGateUp, GateOrder::kInterleaved});
  c.rows = random.pick<int64_t>({0, 1, 1, 2, 3, 7, 8, 9, 33, 64});
  // Rows of whole 16-byte pieces on a GPU.
  const bool on_gpu = device_under_test().type == DeviceType::kCuda;
  const int64_t multiple =
      on_gpu ? std::max<int64_t>(column_multiple(format), 16) : column_multiple(format);
  c.inter = random.chance(60) ? sample_cols(random, multiple) : multiple * random.range(0, 20);
  while (c.rows * c.inter > 30000) c.rows /= 2;
  c.fill = static_cast<Fill>(random.range(0, kNumFills - 1));
  c.scale_order = random.pick({ScaleOrder::kRowsFirst, ScaleOrder::kBlocksFirst});
  c.per_expert = random.chance(40);
  c.has_num_rows =
      random.chance(30) && (format == RowFormat::kFp8Group ||
                            (input == DType::kF8E4M3 && scale_blocks(format, 128) == 0));
  c.token_tile = 1 << random.range(0, 5);
  c.misalignment = 8 * random.range(0, 7);
  c.has_inverse_map = random.chance(50);
  return c;
}

// All buffers of a case but the output.
struct ActivationInputs {
  GuardedBuffer values;
  RowsTensor coded;
  Vector parameters;
  Vector tiles;
  Vector slots;
  Vector num_rows;
  Vector row_to_slot;
  ActivateArgs args;
};

void make_rows(const ActivationCase& c, const BufferStyle& style, Random& random,
               ActivationInputs& inputs) {
  const int64_t cols = c.input_cols();
  if (c.input == DType::kF8E4M3) {
    inputs.coded = RowsTensor(RowFormat::kFp8Group, c.rows, cols, style, c.scale_order);
    fill_elements(c.fill, DType::kF8E4M3, random, c.rows * cols, inputs.coded.values.data());
    fill_elements(Fill::kNormal, DType::kF32, random, inputs.coded.scales.size() / 4,
                  inputs.coded.scales.data());
    inputs.args.input = inputs.coded.view;
    return;
  }
  inputs.values = GuardedBuffer(c.rows * cols * bits(c.input) / 8, style);
  inputs.args.input.values = TensorView::contiguous(inputs.values.data(), c.input, {c.rows, cols});
  if (c.input != DType::kF64) {
    fill_elements(c.fill, c.input, random, c.rows * cols, inputs.values.data());
    return;
  }
  std::vector<float> narrow(static_cast<size_t>(c.rows * cols));
  fill_elements(c.fill, DType::kF32, random, c.rows * cols, narrow.data());
  for (size_t i = 0; i < narrow.size(); ++i) {
    inputs.values.data<double>()[i] =
        static_cast<double>(narrow[i]) * (1.0 + 1e-9 * static_cast<double>(random.normal()));
  }
}

// Positive values, which every parameter may have.
PerExpert sample_parameter(const ActivationCase& c, Random& random, int index,
                           ActivationInputs& inputs) {
  if (!c.per_expert || random.chance(30)) return 0.1F + std::abs(3.0F * random.normal());
  float* first = inputs.parameters.buffer().data<float>() + index * kActivationExperts;
  for (int64_t i = 0; i < kActivationExperts; ++i) {
    first[i] = 0.1F + std::abs(3.0F * random.normal());
  }
  return PerExpert(TensorView::contiguous(first, DType::kF32, {kActivationExperts}));
}

void make_parameters(const ActivationCase& c, Random& random, ActivationInputs& inputs) {
  inputs.parameters = Vector(DType::kF32, 5 * kActivationExperts);
  const ActivationInfo& info = activation_info(c.kind);
  ActivateArgs& args = inputs.args;
  args.activation.kind = c.kind;
  if (info.has_alpha) args.activation.alpha = sample_parameter(c, random, 0, inputs);
  if (info.has_beta) args.activation.beta = sample_parameter(c, random, 1, inputs);
  if (info.has_limits) args.activation.limit_gate = sample_parameter(c, random, 2, inputs);
  if (info.has_limits) args.activation.limit_up = sample_parameter(c, random, 3, inputs);
  const bool takes_multiplier = c.format == RowFormat::kFp8Static || c.format == RowFormat::kNvfp4;
  if (takes_multiplier) args.multiplier = sample_parameter(c, random, 4, inputs);
  inputs.tiles = Vector(DType::kI32, ceil_div(c.rows, c.token_tile));
  for (int32_t& expert : inputs.tiles.buffer().span<int32_t>()) {
    expert = static_cast<int32_t>(random.range(0, kActivationExperts - 1));
  }
  args.tile_to_expert = inputs.tiles.view();
  args.token_tile = c.token_tile;
}

ActivationInputs make_activation_inputs(const ActivationCase& c, const BufferStyle& style) {
  ActivationInputs inputs;
  Random random(c.seed + 1);
  make_rows(c, style, random, inputs);
  make_parameters(c, random, inputs);
  inputs.args.gate_order = c.order;
  inputs.args.format = c.format;
  // Half of the rows in a random order, between slots without one.
  std::vector<int32_t> slots;
  for (int32_t row = 0; row < c.rows; ++row) {
    slots.push_back(random.chance(50) ? row : -1);
    std::swap(slots.back(), slots[static_cast<size_t>(random.range(0, row))]);
  }
  inputs.slots = Vector::of(DType::kI32, slots);
  inputs.args.slot_to_row = inputs.slots.view();
  if (c.has_inverse_map) {
    std::vector<int32_t> inverse(slots.size(), -1);
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      if (slots[slot] >= 0) inverse[static_cast<size_t>(slots[slot])] = static_cast<int32_t>(slot);
    }
    inputs.row_to_slot = Vector::of(DType::kI32, inverse);
    inputs.args.row_to_slot = inputs.row_to_slot.view();
  }
  if (c.has_num_rows) {
    const int32_t used = slots.empty() ? 0 : *std::max_element(slots.begin(), slots.end()) + 1;
    const auto rows = static_cast<int32_t>(random.range(used, c.rows));
    inputs.num_rows = Vector::of<int32_t>(DType::kI32, {rows});
    inputs.args.num_rows = inputs.num_rows.view();
  }
  return inputs;
}

// The call with its views on the device.
ActivateArgs moved_call(const ActivateArgs& host, const DeviceCopies& device) {
  ActivateArgs args = host;
  args.input = device.view(host.input);
  args.output = device.view(host.output);
  for (PerExpert* parameter :
       {&args.activation.alpha, &args.activation.beta, &args.activation.limit_gate,
        &args.activation.limit_up, &args.multiplier}) {
    *parameter = device.view(*parameter);
  }
  args.slot_to_row = device.view(host.slot_to_row);
  args.tile_to_expert = device.view(host.tile_to_expert);
  args.num_rows = device.view(host.num_rows);
  args.row_to_slot = device.view(host.row_to_slot);
  return args;
}

// Empty where the implementation refuses.
std::optional<std::vector<uint8_t>> run_activation(const ActivationCase& c, std::string_view impl,
                                                   Guard guard, std::string* refusal = nullptr) {
  const BufferStyle style{.poison = 0xFF, .guard = guard, .misalignment = c.misalignment};
  ActivationInputs inputs = make_activation_inputs(c, style);
  const RowsTensor output(c.format, c.rows, c.inter, style, c.scale_order);
  inputs.args.output = output.view;
  const DeviceCopies device(
      {&inputs.values, &inputs.coded.values, &inputs.coded.scales, &inputs.parameters.buffer(),
       &inputs.tiles.buffer(), &inputs.slots.buffer(), &inputs.num_rows.buffer(),
       &inputs.row_to_slot.buffer(), &output.values, &output.scales, &output.row_scale},
      {.on_host = !is_for_device(impl), .programmatic_launch = guard == Guard::kPage});
  const ForcedImplementation forced("activation", impl);
  try {
    activate(moved_call(inputs.args, device), device.stream());
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUnsupported) throw;
    if (refusal != nullptr) *refusal = error.what();
    return std::nullopt;
  }
  EXPECT_TRUE(device.take_back());
  EXPECT_TRUE(output.intact() && inputs.values.intact() && inputs.coded.intact());
  return output.bytes();
}

// Neighbours among the E4M3 numbers, or the same NaN.
bool is_one_step(uint8_t a, uint8_t b) {
  const auto place = [](uint8_t code) { return code < 0x80 ? code : 0x80 - code; };
  const bool has_nan = (a & 0x7F) == 0x7F || (b & 0x7F) == 0x7F;
  return has_nan ? a == b : std::abs(place(a) - place(b)) <= 1;
}

bool is_close(float expected, float actual) {
  if (!std::isfinite(expected)) return float_bits(expected) == float_bits(actual);
  return std::abs(expected - actual) <= 1e-2F * std::abs(expected);
}

// One implementation's exponentials are approximate (moe spec 6.2, 6.7): codes differ by one step
// at most and in 8 % of the places, scales by one percent (moe spec 12.3).
std::string activation_difference(const ActivationCase& c, std::string_view impl,
                                  const std::vector<uint8_t>& oracle,
                                  const std::vector<uint8_t>& output) {
  const bool may_differ = impl.ends_with("_swiglu");
  if (oracle == output) return {};
  if (!may_differ || oracle.size() != output.size()) return "the bytes differ";
  const auto codes = static_cast<size_t>(c.rows * c.inter);
  size_t differing = 0;
  for (size_t i = 0; i < codes; ++i) {
    if (!is_one_step(oracle[i], output[i])) return fmt::format("code {} differs by more", i);
    differing += oracle[i] != output[i] ? 1 : 0;
  }
  for (size_t at = codes; at < oracle.size(); at += 4) {
    float expected = 0.0F;
    float actual = 0.0F;
    std::memcpy(&expected, &oracle[at], 4);
    std::memcpy(&actual, &output[at], 4);
    if (!is_close(expected, actual)) {
      return fmt::format("scale {} is {}, expected {}", (at - codes) / 4, actual, expected);
    }
  }
  return differing * 100 <= codes * 8 ? "" : fmt::format("{} of {} codes differ", differing, codes);
}

std::vector<RowCombination> activation_combinations() {
  std::vector<RowCombination> all;
  for (int format = 0; format <= static_cast<int>(RowFormat::kFp8Token); ++format) {
    for (const DType input : {DType::kF32, DType::kF64, DType::kBF16, DType::kF8E4M3}) {
      all.emplace_back(static_cast<RowFormat>(format), input);
    }
  }
  return all;
}

class ActivationConformance : public DeviceTest<RowCombination> {};

TEST_P(ActivationConformance, EveryImplementationGivesTheOraclesBytes) {
  const bool on_gpu = device_under_test().type == DeviceType::kCuda;
  if (on_gpu && GetParam().second == DType::kF64) GTEST_SKIP() << "only the CPU computes in fp64";
  Coverage coverage;
  for_cases(kActivationCases, [&](int64_t index) {
    const auto [format, input] = GetParam();
    const ActivationCase c = sample_activation(
        format, input, case_seed("activation" + row_combination_name(GetParam()), index));
    const auto oracle = run_activation(c, kOracle, Guard::kCanary).value();
    for (const ActivationImpl& impl : activation_impls()) {
      if (!is_for_device(impl.name)) continue;
      const std::string note = repro_line("activation", impl.name, index) + "\n  " + to_string(c);
      set_crash_note(note.c_str());
      for (const Guard guard : {Guard::kCanary, Guard::kPage}) {
        std::string refusal;
        const auto output = run_activation(c, impl.name, guard, &refusal);
        output ? coverage.ran(impl.name) : coverage.refused(impl.name, refusal);
        EXPECT_EQ(output ? activation_difference(c, impl.name, oracle, *output) : "", "") << note;
      }
    }
    coverage.end_case(true, to_string(c));
  });
  coverage.report(row_combination_name(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(All, ActivationConformance, ::testing::ValuesIn(activation_combinations()),
                         [](const auto& test) { return row_combination_name(test.param); });

TEST(ActivationImplementations, EndWithTheOracle) {
  ASSERT_FALSE(activation_impls().empty());
  EXPECT_EQ(activation_impls().back().name, kOracle);
}

}  // namespace
}  // namespace narrowfloat::testing

// See activation_case.h.
#include "cuda/activation_case.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "formats/float16.h"
#include "formats/minifloat.h"
#include "support/device_copies.h"
#include "support/gpu.h"
#include "support/random.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kGroupCols = 128;

IdShape id_shape(int64_t tokens) {
  return {.tokens = tokens, .slots = 8, .experts = 64, .offset = 8, .local = 48, .tile = 8};
}

std::vector<int32_t> random_ids(int64_t tokens) {
  Random random(17);
  return expert_ids(IdSpread::kUniform, id_shape(tokens), random);
}

float special_value(Random& random) {
  constexpr float kInfinity = __builtin_inff();
  return random.pick({kInfinity, -kInfinity, __builtin_nanf(""), 0.0F, -0.0F, 448.0F, -448.0F});
}

float sample_value(ActivationData data, float spread, Random& random) {
  if (data == ActivationData::kSpecials && random.chance(3)) return special_value(random);
  return spread * random.normal();
}

bool is_zero_group(ActivationData data, int64_t index) {
  return data == ActivationData::kSpecials && index / kGroupCols % 5 == 0;
}

void fill_coded(const ActivationCase& c, Random& random) {
  const ActivationData data = c.shape.data;
  auto codes = c.coded.values.span<uint8_t>();
  for (size_t i = 0; i < codes.size(); ++i) {
    const bool is_zero = is_zero_group(data, static_cast<int64_t>(i));
    codes[i] = is_zero ? 0x80 : E4M3::encode(sample_value(data, 100.0F, random));
    if (data == ActivationData::kSpecials && random.chance(1)) codes[i] = 0xFF;
  }
  for (float& scale : c.coded.scales.span<float>()) {
    scale = 0.005F + 0.025F * static_cast<float>(random.range(0, 1000)) / 1000.0F;
    if (data == ActivationData::kSpecials && random.chance(5)) scale = special_value(random);
  }
}

float sample_plain(const ActivationCase& c, size_t index, Random& random) {
  if (is_zero_group(c.shape.data, static_cast<int64_t>(index))) return -0.0F;
  return sample_value(c.shape.data, 2.0F, random);
}

void fill_plain(const ActivationCase& c, Random& random) {
  if (c.shape.input == DType::kF32) {
    auto values = c.values.span<float>();
    for (size_t i = 0; i < values.size(); ++i) values[i] = sample_plain(c, i, random);
  } else {
    auto values = c.values.span<uint16_t>();
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = float_to_bf16(sample_plain(c, i, random));
    }
  }
}

// E4M3 numbers in ascending order.
int place(uint8_t code) { return code < 0x80 ? code : 0x80 - code; }
bool is_nan_code(uint8_t code) { return (code & 0x7F) == 0x7F; }

void compare_code(uint8_t expected, uint8_t actual, ActivationDifference& found) {
  ++found.codes;
  if (expected == actual) return;
  const bool is_near = !is_nan_code(expected) && !is_nan_code(actual) &&
                       std::abs(place(expected) - place(actual)) <= 1;
  ++(is_near ? found.differing : found.far);
}

void compare_scale(uint32_t expected, uint32_t actual, ActivationDifference& found) {
  constexpr uint32_t kPoisonWord = kOutputPoison * 0x01010101U;
  if (expected == kPoisonWord || actual == kPoisonWord) {
    found.touched += expected == actual ? 0 : 4;
    return;
  }
  const auto want = static_cast<double>(bits_float(expected));
  const auto got = static_cast<double>(bits_float(actual));
  if (!std::isfinite(got)) ++found.strange_scales;
  found.worst_scale = std::max(found.worst_scale, std::abs(got - want) / std::abs(want));
}

}  // namespace

std::string to_string(const ActivationShape& shape) {
  return fmt::format("{} {} tokens {} {}{}{}{}", name(shape.input), shape.tokens, shape.inter,
                     name(shape.gate_order), shape.has_num_rows ? " num_rows" : "",
                     shape.has_inverse_map ? " inverse map" : "",
                     shape.data == ActivationData::kSpecials ? " specials" : "");
}

ActivationCase::ActivationCase(const ActivationShape& of)
    : shape(of), maps(id_shape(of.tokens), random_ids(of.tokens)) {
  const int64_t cols = 2 * shape.inter;
  Random random(static_cast<uint64_t>(shape.tokens));
  if (shape.input == DType::kF8E4M3) {
    coded = RowsTensor(RowFormat::kFp8Group, rows(), cols);
    fill_coded(*this, random);
    args.input = coded.view;
  } else {
    values = GuardedBuffer(rows() * cols * bits(shape.input) / 8, {});
    fill_plain(*this, random);
    args.input.values = TensorView::contiguous(values.data(), shape.input, {rows(), cols});
  }
  args.gate_order = shape.gate_order;
  args.slot_to_row = maps.maps.slot_to_row;
  args.tile_to_expert = maps.maps.tile_to_expert;
  args.token_tile = maps.maps.token_tile;
  args.format = RowFormat::kFp8Group;
  if (shape.has_num_rows) args.num_rows = maps.maps.num_rows;
  if (shape.has_inverse_map) args.row_to_slot = maps.maps.row_to_slot;
}

RowsTensor activated_on_cpu(const ActivationCase& c) {
  RowsTensor output(RowFormat::kFp8Group, c.rows(), c.shape.inter, {.poison = kOutputPoison});
  ActivateArgs args = c.args;
  args.output = output.view;
  activate(args);
  return output;
}

RowsTensor activated_on_gpu(const ActivationCase& c, const GpuRun& run,
                            const GuardedBuffer& alpha) {
  RowsTensor output(RowFormat::kFp8Group, c.rows(), c.shape.inter, {.poison = kOutputPoison});
  const DeviceCopies device({&c.maps.buffer, &c.coded.values, &c.coded.scales, &c.values, &alpha,
                             &output.values, &output.scales});
  ActivateArgs args = c.args;
  args.input = device.view(c.args.input);
  args.activation.alpha = device.view(c.args.activation.alpha);
  args.slot_to_row = device.view(c.args.slot_to_row);
  args.tile_to_expert = device.view(c.args.tile_to_expert);
  args.num_rows = device.view(c.args.num_rows);
  args.row_to_slot = device.view(c.args.row_to_slot);
  args.output = device.view(output.view);
  // Copies to the device are done when they return.
  const CudaStream stream;
  const Stream queue = stream.get(run.programmatic_launch);
  if (run.replays == 0) {
    activate(args, queue);
  } else {
    const CapturedGraph graph(stream, [&] {
      activate(args, queue);
      activate(args, queue);
    });
    graph.replay(run.replays);
  }
  stream.synchronize();
  EXPECT_TRUE(device.take_back());
  return output;
}

ActivationDifference difference(const ActivationCase& c, const RowsTensor& expected,
                                const RowsTensor& actual) {
  std::vector<bool> is_named(static_cast<size_t>(c.rows()), false);
  for (const int32_t row : ints(c.args.slot_to_row)) {
    if (row >= 0) is_named[static_cast<size_t>(row)] = true;
  }
  ActivationDifference found;
  for (int64_t row = 0; row < c.rows(); ++row) {
    const uint8_t* const want = expected.values.data() + row * c.shape.inter;
    const uint8_t* const got = actual.values.data() + row * c.shape.inter;
    for (int64_t col = 0; col < c.shape.inter; ++col) {
      if (is_named[static_cast<size_t>(row)]) {
        compare_code(want[col], got[col], found);
      } else {
        found.touched += want[col] == got[col] ? 0 : 1;
      }
    }
  }
  const auto want = expected.scales.span<uint32_t>();
  const auto got = actual.scales.span<uint32_t>();
  for (size_t i = 0; i < want.size(); ++i) compare_scale(want[i], got[i], found);
  return found;
}

}  // namespace narrowfloat::testing

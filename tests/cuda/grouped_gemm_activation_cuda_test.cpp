// grouped_gemm with SwiGLU and requantization in its epilogue: the rows that activate() on the CPU
// makes of the same GEMM's sums. To the bit where the sigmoid is exact (alpha 0: one half), as
// everything but the hardware's exponential is then the same; otherwise but for a few codes.
#include <algorithm>
#include <cstring>

#include <gtest/gtest.h>

#include "conformance/case_sampling.h"
#include "cuda/gpu_test.h"
#include "layers/moe/row_buffers.h"
#include "narrowfloat/error.h"
#include "support/expect_error.h"
#include "support/gemm_device_run.h"
#include "support/moe_modes.h"
#include "tensor/row_format.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kGemmActivationCases = 24;
constexpr uint8_t kPoison = 0xFF;

// The format that grouped_gemm writes for a mode: rows with a scale each are quantized from bf16
// afterwards.
RowFormat written_rows(MoeMode mode) {
  const RowFormat rows = moe_mode_info(mode).intermediate;
  return has_row_scale(rows) ? RowFormat::kBf16 : rows;
}

// The largest of the kernel's tiles that takes an activation.
int32_t largest_tile(MoeMode mode) {
  const bool has_fp8_weights = mode == MoeMode::kFp8Tensor || mode == MoeMode::kFp8Block;
  return has_fp8_weights || written_rows(mode) == RowFormat::kMxfp8 ? 64 : 256;
}

GemmCaseSpec sample_activated_gemm(MoeMode mode, Random& random) {
  const int64_t multiple = moe_mode_info(mode).multiple;
  GemmCaseSpec spec{.mode = mode};
  spec.cols = multiple * random.range(1, 512 / multiple);
  spec.weight_rows = 2 * multiple * random.range(1, 320 / multiple);
  spec.expert_rows.clear();
  const int64_t experts = random.range(1, 6);
  int64_t left = kMaxProducts / (spec.cols * spec.weight_rows);
  for (int64_t i = 0; i < experts; ++i) {
    const int64_t rows =
        std::min(left, random.pick<int64_t>({0, 1, 2, 3, 5, 17, 36, 64, 140, 300}));
    spec.expert_rows.push_back(rows);
    left -= rows;
  }
  spec.token_tile = std::min(random.pick({1, 2, 4, 8, 16, 32, 64, 128, 256}), largest_tile(mode));
  spec.gathers = random.chance(50);
  spec.has_slot_weights = random.chance(50);
  if (random.chance(60)) spec.bias = random.pick({DType::kF32, DType::kBF16});
  spec.gate_order = random.pick({GateOrder::kUpGate, GateOrder::kGateUp, GateOrder::kInterleaved});
  spec.knows_halves = true;
  spec.has_scale = random.chance(60);
  spec.wide_scales = random.chance(50);
  spec.seed = random.bits();
  return spec;
}

// Values of a parameter, one for all experts or one for each.
class Parameter {
 public:
  Parameter(int64_t experts, bool per_expert, Random& random, float least, float most)
      : values_(static_cast<size_t>(experts)) {
    for (float& value : values_) {
      value = least + (most - least) * static_cast<float>(random.range(0, 1000)) / 1000.0F;
    }
    is_per_expert_ = per_expert;
  }
  [[nodiscard]] PerExpert view() const {
    if (!is_per_expert_) return values_[0];
    return PerExpert(TensorView::contiguous(values_.data(), DType::kF32,
                                            {static_cast<int64_t>(values_.size())}));
  }

 private:
  std::vector<float> values_;
  bool is_per_expert_;
};

// The activation of a case and both ways to its rows.
class ActivatedGemm {
 public:
  ActivatedGemm(const GemmCaseSpec& spec, const Activation& activation, const PerExpert& multiplier)
      : gemm_(spec),
        activation_(activation),
        multiplier_(multiplier),
        format_(written_rows(spec.mode)),
        rows_(row_buffers(format_, gemm_.max_rows(), spec.weight_rows / 2)) {}

  // Bytes of the rows, followed by their scales.
  [[nodiscard]] std::vector<uint8_t> expected() const;
  [[nodiscard]] std::vector<uint8_t> fused(bool programmatic_launch,
                                           const DeviceBuffer* next_tile = nullptr) const;
  [[nodiscard]] int64_t values_bytes() const { return rows_.values_bytes; }

 private:
  [[nodiscard]] bool has_multiplier() const {
    return format_ == RowFormat::kFp8Static || format_ == RowFormat::kNvfp4;
  }

  GemmCase gemm_;
  Activation activation_;
  PerExpert multiplier_;
  RowFormat format_;
  RowBuffers rows_;
};

std::vector<uint8_t> ActivatedGemm::expected() const {
  const GemmOnDevice sums(gemm_);
  const std::vector<uint8_t> finished = sums.run();
  std::vector<uint8_t> bytes(static_cast<size_t>(rows_.bytes()), kPoison);
  std::vector<int32_t> valid;
  for (const GemmCase::Row& row : gemm_.rows()) valid.push_back(static_cast<int32_t>(row.row));
  const Permutation permutation = gemm_.args().permutation;
  ActivateArgs args;
  args.input.values = TensorView::contiguous(finished.data(), DType::kF32,
                                             {gemm_.max_rows(), gemm_.spec().weight_rows});
  args.activation = activation_;
  args.gate_order = *gemm_.spec().gate_order;
  args.slot_to_row =
      TensorView::contiguous(valid.data(), DType::kI32, {static_cast<int64_t>(valid.size())});
  args.tile_to_expert = permutation.tile_to_expert;
  args.token_tile = permutation.token_tile;
  args.format = format_;
  if (has_multiplier()) args.multiplier = multiplier_;
  args.output = rows_.bind(reinterpret_cast<std::byte*>(bytes.data()), rows_.rows, {});
  activate(args);
  return bytes;
}

std::vector<uint8_t> ActivatedGemm::fused(bool programmatic_launch,
                                          const DeviceBuffer* next_tile) const {
  GemmOnDevice device(gemm_);
  if (next_tile != nullptr) {
    device.layer.next_tile = reinterpret_cast<uint32_t*>(next_tile->data());
  }
  const DeviceBuffer output(rows_.bytes(), {.poison = kPoison});
  GemmActivation& activation = device.args.activation.emplace();
  activation.activation = activation_;
  for (PerExpert* parameter : {&activation.activation.alpha, &activation.activation.beta,
                               &activation.activation.limit_gate, &activation.activation.limit_up,
                               &activation.multiplier}) {
    if (parameter == &activation.multiplier && has_multiplier()) *parameter = multiplier_;
    parameter->values = device.copy(parameter->values);
  }
  activation.format = format_;
  activation.output = rows_.bind(reinterpret_cast<std::byte*>(output.data()), rows_.rows, gpu());
  device.args.output = {};
  static_cast<void>(device.run(programmatic_launch));
  EXPECT_TRUE(output.intact());
  return output.copy();
}

class GemmActivationCuda : public ::testing::TestWithParam<MoeMode> {
 protected:
  void SetUp() override {
    if (const std::string reason = gpu_missing(); !reason.empty()) GTEST_SKIP() << reason;
    if (!gpu_has_own_code() && written_rows(GetParam()) != RowFormat::kBf16) {
      GTEST_SKIP() << "portable code writes rows of bf16 only";
    }
  }
};

// Every third case has no parameters.
Activation sampled_activation(Random& random, float alpha, const std::vector<Parameter>& values) {
  Activation activation = Activation::swiglu();
  activation.alpha = alpha;
  if (random.chance(33)) return activation;
  activation.beta = values[0].view();
  activation.limit_gate = values[1].view();
  activation.limit_up = values[2].view();
  return activation;
}

std::vector<Parameter> sampled_parameters(int64_t experts, Random& random) {
  const bool per_expert = random.chance(50);
  std::vector<Parameter> values;
  values.emplace_back(experts, per_expert, random, 0.0F, 1.0F);         // beta
  values.emplace_back(experts, per_expert, random, 0.5F, 9.0F);         // limit_gate
  values.emplace_back(experts, per_expert, random, 0.5F, 9.0F);         // limit_up
  values.emplace_back(experts, random.chance(50), random, 0.1F, 3.0F);  // multiplier
  return values;
}

TEST_P(GemmActivationCuda, HasTheBitsOfTheActivationWhereTheSigmoidIsExact) {
  for_cases(kGemmActivationCases, [&](int64_t index) {
    Random random(case_seed("gemm_activation " + std::string(name(GetParam())), index));
    const GemmCaseSpec spec = sample_activated_gemm(GetParam(), random);
    const auto values = sampled_parameters(static_cast<int64_t>(spec.expert_rows.size()), random);
    const ActivatedGemm gemm(spec, sampled_activation(random, 0.0F, values), values[3].view());
    SCOPED_TRACE(repro_line("grouped_gemm", "sm90_wgmma", index) + "\n  " + to_string(spec));
    const std::vector<uint8_t> expected = gemm.expected();
    const std::vector<uint8_t> actual = gemm.fused(index % 2 == 1);
    const auto first = std::mismatch(expected.begin(), expected.end(), actual.begin()).first;
    ASSERT_EQ(first - expected.begin(), static_cast<std::ptrdiff_t>(expected.size()))
        << "values have " << gemm.values_bytes() << " bytes";
  });
}

// Code by code or element by element, G2 of moe spec 12.3.
TEST_P(GemmActivationCuda, DiffersFromTheActivationInFewBytes) {
  int64_t bytes = 0;
  int64_t different = 0;
  for (const float alpha : {1.0F, 1.702F}) {
    for (const int32_t tile : {8, 32, 64, largest_tile(GetParam())}) {
      GemmCaseSpec spec{.mode = GetParam(),
                        .weight_rows = 768,
                        .cols = 256,
                        .expert_rows = {100, 0, 37},
                        .token_tile = tile,
                        .gate_order = GateOrder::kInterleaved,
                        .knows_halves = true,
                        .wide_scales = false,
                        .seed = 3};
      Activation activation = Activation::swiglu();
      activation.alpha = alpha;
      const ActivatedGemm gemm(spec, activation, 1.0F);
      const std::vector<uint8_t> expected = gemm.expected();
      const std::vector<uint8_t> actual = gemm.fused(false);
      for (size_t i = 0; i < expected.size(); ++i) different += expected[i] != actual[i] ? 1 : 0;
      bytes += static_cast<int64_t>(expected.size());
    }
  }
  EXPECT_LE(static_cast<double>(different), 0.002 * static_cast<double>(bytes));
}

// A small number of output tiles runs in clusters of two CTAs, which share groups of 128 columns;
// with more than one and a half times as many tiles as SMs one CTA makes a group in two passes.
// Clusters have a static schedule. 256 columns are less than a ring of stages, so racecheck follows
// the hand-overs.
TEST_P(GemmActivationCuda, FewAndManyTilesHaveTheBitsOfTheActivation) {
  for (const size_t experts : {1, 10, 55, 80}) {
    GemmCaseSpec spec{.mode = GetParam(),
                      .weight_rows = GetParam() == MoeMode::kFp8Block ? 768 : 640,
                      .cols = 256,
                      .token_tile = 8,
                      .gate_order = GateOrder::kUpGate,
                      .knows_halves = true,
                      .wide_scales = false,
                      .seed = 4};
    spec.expert_rows.assign(experts, 3);
    spec.expert_rows.front() = 8;
    Activation activation = Activation::swiglu();
    activation.alpha = 0.0F;
    const ActivatedGemm gemm(spec, activation, 1.0F);
    SCOPED_TRACE(to_string(spec));
    const DeviceBuffer next_tile(sizeof(uint32_t), {.poison = 0});
    EXPECT_EQ(gemm.expected(), gemm.fused(true, &next_tile));
    const std::vector<uint8_t> taken = next_tile.copy();
    const bool is_dynamic = std::ranges::any_of(taken, [](uint8_t byte) { return byte != 0; });
    const bool makes_groups = written_rows(GetParam()) == RowFormat::kFp8Group;
    // Between these the GPU's number of SMs decides.
    if (gpu_has_own_code() && (experts == 1 || experts == 80)) {
      EXPECT_EQ(is_dynamic, experts == 80 || !makes_groups);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GemmActivationCuda, ::testing::ValuesIn(every_gpu_moe_mode()),
                         [](const auto& test) { return std::string(name(test.param)); });

class GemmActivationChecks : public OwnCodeTest {};

TEST_F(GemmActivationChecks, RefuseWhatTheImplementationDoesNotDo) {
  const auto run = [](const GemmCaseSpec& spec, ActivationKind kind, RowFormat format) {
    const GemmCase gemm(spec);
    GemmOnDevice device(gemm);
    device.args.output = {};
    device.args.activation.emplace();
    device.args.activation->activation = Activation::plain(kind);
    device.args.activation->format = format;
    static_cast<void>(device.run());
  };
  GemmCaseSpec spec{.gate_order = GateOrder::kUpGate, .knows_halves = true};
  expect_error(ErrorKind::kUnsupported, {"activation", "sm90_wgmma", "swiglu only"},
               [&] { run(spec, ActivationKind::kGegluTanh, RowFormat::kBf16); });
  expect_error(ErrorKind::kUnsupported, {"activation", "second GEMM reads"},
               [&] { run(spec, ActivationKind::kSwiglu, RowFormat::kMxfp8); });
  expect_error(ErrorKind::kUnsupported, {"activation", "more than 64 tokens"}, [&] {
    GemmCaseSpec many = spec;
    many.mode = MoeMode::kFp8Tensor;
    many.token_tile = 128;
    run(many, ActivationKind::kSwiglu, RowFormat::kFp8Static);
  });
  spec.knows_halves = false;
  expect_error(ErrorKind::kUnsupported, {"activation", "gate order"},
               [&] { run(spec, ActivationKind::kSwiglu, RowFormat::kBf16); });
}

TEST_F(GemmActivationChecks, RefuseTwoOutputs) {
  const GemmCase gemm({.gate_order = GateOrder::kUpGate, .knows_halves = true});
  GemmOnDevice device(gemm);
  device.args.activation.emplace();
  const RowBuffers rows = row_buffers(RowFormat::kBf16, gemm.max_rows(), 16);
  const DeviceBuffer output(rows.bytes());
  device.args.activation->output =
      rows.bind(reinterpret_cast<std::byte*>(output.data()), rows.rows, gpu());
  expect_error(ErrorKind::kInvalidArgument, {"output", "leave it unset"},
               [&] { static_cast<void>(device.run()); });
}

TEST_F(GemmActivationChecks, RefuseSumsInFp64AndParametersInTheOutput) {
  const GemmCase gemm({.gate_order = GateOrder::kUpGate, .knows_halves = true});
  GemmOnDevice device(gemm);
  device.args.output = {};
  GemmActivation& activation = device.args.activation.emplace();
  const RowBuffers rows = row_buffers(RowFormat::kBf16, gemm.max_rows(), 16);
  const DeviceBuffer output(rows.bytes());
  activation.output = rows.bind(reinterpret_cast<std::byte*>(output.data()), rows.rows, gpu());
  device.args.accumulation = Accumulation::kFp64;
  expect_error(ErrorKind::kUnsupported, {"accumulation", "fp64"},
               [&] { static_cast<void>(device.run()); });
  device.args.accumulation = Accumulation::kFp32;
  const int64_t experts = device.weights().experts();
  activation.activation.alpha =
      PerExpert(TensorView::contiguous(output.data(), DType::kF32, {experts}, gpu()));
  expect_error(ErrorKind::kInvalidArgument,
               {"activation.output.values", "overlaps", "activation.alpha"},
               [&] { static_cast<void>(device.run()); });
}

}  // namespace
}  // namespace narrowfloat::testing

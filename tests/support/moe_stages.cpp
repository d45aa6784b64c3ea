// See moe_stages.h.
#include "support/moe_stages.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "formats/float16.h"
#include "formats/minifloat.h"
#include "layers/moe/moe_run.h"
#include "tensor/row_format.h"

namespace narrowfloat::testing {
namespace {

constexpr uint8_t kPoison = 0xFF;

// A prepared layer, and memory of one run of it.
class StagedLayer {
 public:
  StagedLayer(MoeCase& layer_case, StagePlace& place, Accumulation accumulation)
      : place_(place),
        tokens_(layer_case.shape().tokens),
        layer_(weights_at(layer_case, place), layer_case.config(), {.accumulation = accumulation},
               place.device(), place.stream()),
        plan_(layer_.plan(tokens_, layer_.token_tile(tokens_))),
        workspace_(place.memory(plan_.workspace_bytes())) {
    const MoeConfig& config = layer_.config;
    inputs_.values = place.moved(layer_case.inputs().values);
    routing_.logits = place.moved(layer_case.routing().logits);
    routing_.bias = place.moved(layer_case.routing().bias);
    outputs_.out =
        TensorView::contiguous(place.memory(tokens_ * config.hidden * bits(config.out_dtype) / 8),
                               config.out_dtype, {tokens_, config.hidden}, place.device());
    outputs_.slot_out = TensorView::contiguous(
        place.memory(max_rows() * config.hidden * bits(config.slot_dtype) / 8), config.slot_dtype,
        {max_rows(), config.hidden}, place.device());
  }

  void run(MoeStage last) const {
    const TensorView workspace =
        TensorView::contiguous(workspace_, DType::kU8, {plan_.workspace_bytes()}, place_.device());
    const MoeCall call{inputs_, routing_, outputs_, workspace, tokens_};
    check_moe_call(call, layer_.config, plan_, layer_.extents, layer_.input_multiplier.has_value(),
                   place_.device());
    MoeRun(layer_, plan_, call, place_.stream()).run(last);
  }

  [[nodiscard]] const PreparedMoe& layer() const { return layer_; }
  [[nodiscard]] const MoePlan& plan() const { return plan_; }
  [[nodiscard]] int64_t max_rows() const { return plan_.permutation().max_rows; }
  // A buffer of the workspace, and its first bytes in host memory.
  [[nodiscard]] std::byte* buffer(MoeBufferId id) const {
    return reinterpret_cast<std::byte*>(workspace_) + plan_.buffer(id).offset;
  }
  [[nodiscard]] std::vector<uint8_t> bytes_in(MoeBufferId id, int64_t bytes) const {
    return place_.read(workspace_ + plan_.buffer(id).offset, bytes);
  }
  [[nodiscard]] Permutation permutation() const {
    return plan_.permutation().bind(buffer(MoeBufferId::kPermutation), place_.device());
  }
  [[nodiscard]] std::vector<uint8_t> bytes_of(const TensorView& view) const {
    return place_.read(static_cast<const uint8_t*>(view.data),
                       view.num_elements() * bits(view.dtype) / 8);
  }
  [[nodiscard]] const MoeOutputs& outputs() const { return outputs_; }

 private:
  static MoeWeights weights_at(MoeCase& layer_case, StagePlace& place) {
    MoeWeights weights = layer_case.weights();
    for (WeightView* weight : {&weights.w1, &weights.w2}) {
      weight->values = place.moved(weight->values);
      weight->scales = place.moved(weight->scales);
    }
    for (PerExpert* factor :
         {&weights.up_scale, &weights.gate_scale, &weights.down_scale, &weights.inter_multiplier}) {
      factor->values = place.moved(factor->values);
    }
    weights.bias1 = place.moved(weights.bias1);
    weights.bias2 = place.moved(weights.bias2);
    return weights;
  }

  StagePlace& place_;
  int64_t tokens_;
  PreparedMoe layer_;
  MoePlan plan_;
  uint8_t* workspace_;
  MoeInputs inputs_;
  Routing routing_;
  MoeOutputs outputs_;
};

// Rows that hold a slot.
std::vector<int64_t> used_rows(const StagedLayer& reference) {
  const Permutation permutation = reference.permutation();
  std::vector<int64_t> rows;
  for (int64_t slot = 0; slot < permutation.slot_to_row.num_elements(); ++slot) {
    const int32_t row = static_cast<const int32_t*>(permutation.slot_to_row.data)[slot];
    if (row >= 0) rows.push_back(row);
  }
  return rows;
}

double number(DType dtype, const std::vector<uint8_t>& bytes, int64_t index) {
  if (dtype == DType::kF64) {
    double value = 0;
    std::memcpy(&value, &bytes[static_cast<size_t>(index) * 8], 8);
    return value;
  }
  float value = 0;
  std::memcpy(&value, &bytes[static_cast<size_t>(index) * 4], 4);
  return value;
}

// G1
void expect_fc1_close(const StagedLayer& reference, const StagedLayer& actual, double bound) {
  const int64_t cols = reference.layer().extents.fc1_rows;
  const auto fc1_of = [&](const StagedLayer& layer) {
    const DType dtype = layer.layer().extents.fc1_dtype();
    return layer.bytes_in(MoeBufferId::kGemmRows, layer.max_rows() * cols * bits(dtype) / 8);
  };
  const std::vector<uint8_t> expected = fc1_of(reference);
  const std::vector<uint8_t> found = fc1_of(actual);
  double error = 0;
  double norm = 0;
  for (const int64_t row : used_rows(reference)) {
    for (int64_t i = row * cols; i < (row + 1) * cols; ++i) {
      const double value = number(reference.layer().extents.fc1_dtype(), expected, i);
      const double apart = number(actual.layer().extents.fc1_dtype(), found, i) - value;
      error += apart * apart;
      norm += value * value;
    }
  }
  EXPECT_LE(std::sqrt(error / norm), bound) << "G1";
}

// The intermediate of a run in host memory.
struct Intermediate {
  Intermediate(const StagedLayer& layer)
      : rows(layer.plan().intermediate_rows()),
        bytes(layer.bytes_in(MoeBufferId::kIntermediateRows, rows.bytes())) {
    auto* begin = reinterpret_cast<std::byte*>(bytes.data());
    view = rows.bind(begin, layer.max_rows(), {});
  }
  Intermediate(const Intermediate&) = delete;
  Intermediate& operator=(const Intermediate&) = delete;

  RowBuffers rows;
  std::vector<uint8_t> bytes;
  CodedRows view;
};

// A code's place in the order of the values, and its value without the scale.
struct Code {
  int order = 0;
  double value = 0;
};
Code code_of(int code, int sign_bit, float value) {
  const int magnitude = code & (sign_bit - 1);
  return {(code & sign_bit) != 0 ? -magnitude : magnitude, value};
}
Code code_at(const CodedRows& rows, int64_t row, int64_t col) {
  const TensorView& values = rows.values;
  const int64_t at = row * values.shape[1];
  const auto* bytes = static_cast<const uint8_t*>(values.data);
  if (values.dtype == DType::kU8) {
    const auto code = static_cast<uint8_t>(bytes[at + col / 2] >> (col % 2 * 4) & 0xF);
    return code_of(code, 8, E2M1::decode(code));
  }
  if (values.dtype == DType::kF8E4M3) {
    return code_of(bytes[at + col], 0x80, E4M3::decode(bytes[at + col]));
  }
  uint16_t code = 0;
  std::memcpy(&code, bytes + (at + col) * 2, 2);
  return code_of(code, 0x8000, bf16_to_float(code));
}

// Whether two runs have the same scale of a block; expects that it is nearly so.
bool has_same_scale(const TensorView& expected, const TensorView& found, int64_t index,
                    double bound) {
  if (expected.dtype != DType::kF32) {
    const int a = static_cast<const uint8_t*>(expected.data)[index];
    const int b = static_cast<const uint8_t*>(found.data)[index];
    EXPECT_LE(std::abs(a - b), 1) << "G2 scale " << index;
    return a == b;
  }
  const double a = static_cast<const float*>(expected.data)[index];
  const double b = static_cast<const float*>(found.data)[index];
  EXPECT_LE(std::abs(a - b), bound * std::abs(a)) << "G2 scale " << index;
  return true;  // As far as a step of a code goes.
}

// Columns [first, second) of a row, which have one scale or none.
using Columns = std::pair<int64_t, int64_t>;

double mean_square(const CodedRows& rows, int64_t row, const Columns& cols) {
  double squares = 0;
  for (int64_t col = cols.first; col < cols.second; ++col) {
    const double value = code_at(rows, row, col).value;
    squares += value * value;
  }
  return squares / static_cast<double>(cols.second - cols.first);
}

// Expects codes of the same scale a step apart at most, or, where steps near zero are smaller than
// the distance of two sums, not further apart than those.
void expect_near_codes(const CodedRows& expected, const CodedRows& found, int64_t row,
                       const Columns& cols, const StageBounds& bounds) {
  constexpr double kOfTheNorm = 10;
  const double mean = std::sqrt(mean_square(expected, row, cols));
  for (int64_t col = cols.first; col < cols.second; ++col) {
    const Code a = code_at(expected, row, col);
    const Code b = code_at(found, row, col);
    if (std::abs(a.order - b.order) <= 1) continue;
    ASSERT_LE(std::abs(a.value - b.value), kOfTheNorm * bounds.fc1 * mean)
        << "G2 row " << row << " column " << col << ": " << b.value << " for " << a.value << ", "
        << mean << " on average";
  }
}

// G2
void expect_codes_close(const StagedLayer& reference, const Intermediate& expected,
                        const Intermediate& found, const StageBounds& bounds) {
  const int64_t cols = expected.rows.cols;
  const int64_t blocks = scale_blocks(expected.rows.format, cols);
  const int64_t block_cols = blocks == 0 ? cols : (cols + blocks - 1) / blocks;
  int64_t differing = 0;
  int64_t count = 0;
  for (const int64_t row : used_rows(reference)) {
    if (!expected.view.row_scale.is_absent()) {
      has_same_scale(expected.view.row_scale, found.view.row_scale, row, bounds.scales);
    }
    for (int64_t begin = 0; begin < cols; begin += block_cols) {
      const Columns block{begin, std::min(cols, begin + block_cols)};
      const bool is_same_scale =
          blocks == 0 || has_same_scale(expected.view.scales, found.view.scales,
                                        row * blocks + begin / block_cols, bounds.scales);
      if (is_same_scale) {
        ASSERT_NO_FATAL_FAILURE(expect_near_codes(expected.view, found.view, row, block, bounds));
      }
      for (int64_t col = block.first; col < block.second; ++col, ++count) {
        const bool differs =
            code_at(expected.view, row, col).order != code_at(found.view, row, col).order;
        differing += differs ? 1 : 0;
      }
    }
  }
  EXPECT_LE(static_cast<double>(differing), bounds.codes * static_cast<double>(count)) << "G2";
}

void expect_near(std::string_view stage, const std::vector<uint8_t>& expected,
                 const std::vector<uint8_t>& found, const StagedLayer& layer, DType dtype,
                 const Distance& bound) {
  const Distance apart =
      distance(as_floats(found, dtype), as_floats(expected, dtype), layer.layer().config.hidden);
  EXPECT_LE(apart.rel, bound.rel) << stage;
  EXPECT_LE(apart.row, bound.row) << stage;
}

// G3: the reference's second half on the intermediate of the compared run, into its own outputs.
void run_second_half(const StagedLayer& reference, const CodedRows& intermediate) {
  const PreparedMoe& layer = reference.layer();
  GroupedGemmArgs args;
  args.a = intermediate;
  args.permutation = reference.permutation();
  args.accumulation = Accumulation::kFp64;
  args.scale = layer.down_scale.view();
  args.bias = layer.bias2.view();
  args.output = reference.outputs().slot_out;
  grouped_gemm(
      args, layer.w2,
      TensorView::contiguous(reference.buffer(MoeBufferId::kSecondGemmScratch), DType::kU8,
                             {reference.plan().buffer(MoeBufferId::kSecondGemmScratch).bytes}));
  const TensorView weights =
      TensorView::contiguous(reference.buffer(MoeBufferId::kWeights), DType::kF32,
                             {reference.plan().tokens(), layer.extents.slots});
  combine(reference.outputs().slot_out, args.permutation.slot_to_row, weights,
          reference.outputs().out);
}

}  // namespace

uint8_t* HostPlace::memory(int64_t bytes) {
  buffers_.emplace_back(static_cast<size_t>(bytes) + 256, kPoison);
  const auto address = reinterpret_cast<uintptr_t>(buffers_.back().data());
  return reinterpret_cast<uint8_t*>((address + 255) / 256 * 256);
}

std::vector<uint8_t> HostPlace::read(const uint8_t* memory, int64_t bytes) const {
  return {memory, memory + bytes};
}

StageBounds stage_bounds(MoeMode mode) {
  const Distance exact{1e-3, 3e-3};
  const Distance fp8{4e-3, 8e-3};
  switch (mode) {
    case MoeMode::kBf16:
    case MoeMode::kMxfp4Bf16:
    case MoeMode::kNvfp4Bf16:
    case MoeMode::kMxfp4Int8:
    case MoeMode::kNvfp4Int8:
      return {5e-5, 0.03, 0, exact, {3e-3, 1e-2}};
    case MoeMode::kFp8Tensor:
    case MoeMode::kFp8Block:
    case MoeMode::kMxfp4Fp8:
    case MoeMode::kNvfp4Fp8Rounded:
      return {1.5e-3, 0.08, 1e-2, fp8, {2e-2, 6e-2}};
    case MoeMode::kMxfp4Fp8Token:
    case MoeMode::kNvfp4Fp8Token:
      return {3e-3, 0.15, 1e-2, fp8, {4e-2, 6e-2}};
    case MoeMode::kMxfp8:
    case MoeMode::kMxfp4Mxfp8:
      return {5e-5, 0.005, 0, exact, {5e-3, 4e-2}};
    case MoeMode::kNvfp4:
      return {5e-5, 0.005, 0, exact, {1.5e-2, 8e-2}};
    case MoeMode::kNvfp4PerToken:
      return {5e-5, 0.04, 1e-2, exact, {3e-2, 1.5e-1}};
    case MoeMode::kNvfp4Fp8Exact:
      return {5e-5, 0.01, 1e-2, exact, {5e-3, 2e-2}};
  }
  return {};
}

void expect_stages_close(MoeCase& layer_case, StagePlace& place, bool compares_fc1) {
  const StageBounds bounds = stage_bounds(layer_case.config().mode);
  const MoeConfig& config = layer_case.config();
  HostPlace host;
  const StagedLayer reference(layer_case, host, Accumulation::kFp64);
  const StagedLayer actual(layer_case, place, Accumulation::kFp32);
  if (compares_fc1) {
    reference.run(MoeStage::kFirstGemm);
    actual.run(MoeStage::kFirstGemm);
    expect_fc1_close(reference, actual, bounds.fc1);
  }
  reference.run(MoeStage::kCombine);
  actual.run(MoeStage::kCombine);
  const Intermediate found(actual);
  {
    const Intermediate expected(reference);
    expect_codes_close(reference, expected, found, bounds);
  }
  const std::vector<uint8_t> out = actual.bytes_of(actual.outputs().out);
  expect_near("G4", reference.bytes_of(reference.outputs().out), out, actual, config.out_dtype,
              bounds.end_to_end);
  run_second_half(reference, found.view);
  expect_near("G3", reference.bytes_of(reference.outputs().out), out, actual, config.out_dtype,
              bounds.second);
}

}  // namespace narrowfloat::testing

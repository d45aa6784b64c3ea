// The activation between the two GEMMs of an expert: SwiGLU of rows that are sorted by expert, then
// FP8 1x128 (moe spec 6.7). Every token goes to `top_k` random experts.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>

#include <fmt/format.h>

#include "bench_cli/work.h"
#include "narrowfloat/activation.h"
#include "narrowfloat/permute.h"
#include "narrowfloat/quantize.h"

namespace narrowfloat::cli {
namespace {

// The arithmetic of another device may differ in so much (moe spec 12.3, G2 of mode 3).
constexpr double kMaxDifferingCodes = 0.08;
constexpr double kMaxScaleDifference = 1e-2;
constexpr int64_t kActivationGroup = 128;

template <typename Value>
Bytes bytes_of(const std::vector<Value>& values) {
  Bytes bytes(values.size() * sizeof(Value));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::vector<int32_t> random_experts(int64_t tokens, const ActivationShape& shape) {
  std::mt19937_64 random(7);
  std::vector<int32_t> ids;
  std::vector<int32_t> chosen;
  for (int64_t token = 0; token < tokens; ++token) {
    chosen.clear();
    while (static_cast<int64_t>(chosen.size()) < shape.top_k) {
      const auto expert = static_cast<int32_t>(random() % static_cast<uint64_t>(shape.experts));
      if (std::find(chosen.begin(), chosen.end(), expert) == chosen.end()) chosen.push_back(expert);
    }
    ids.insert(ids.end(), chosen.begin(), chosen.end());
  }
  return ids;
}

struct Rows {
  std::vector<int32_t> slot_to_row;
  std::vector<int32_t> row_to_slot;
  int32_t num_rows = 0;  // Padding included.
};

Rows sorted_rows(int64_t tokens, const ActivationShape& shape) {
  const std::vector<int32_t> ids = random_experts(tokens, shape);
  const auto experts = static_cast<int32_t>(shape.experts);
  const PermutationLayout layout = permutation_layout(tokens, shape.top_k, experts, shape.tile);
  std::vector<int32_t> buffer(static_cast<size_t>(layout.bytes) / sizeof(int32_t) + 1);
  const Permutation permutation = layout.bind(buffer.data());
  permute(TensorView::contiguous(ids.data(), DType::kI32, {tokens, shape.top_k}), 0, experts,
          permutation);
  Rows rows;
  rows.slot_to_row.resize(ids.size());
  std::memcpy(rows.slot_to_row.data(), permutation.slot_to_row.data, ids.size() * sizeof(int32_t));
  std::memcpy(&rows.num_rows, permutation.num_rows.data, sizeof(int32_t));
  rows.row_to_slot.resize(static_cast<size_t>(rows.num_rows));
  std::memcpy(rows.row_to_slot.data(), permutation.row_to_slot.data,
              rows.row_to_slot.size() * sizeof(int32_t));
  return rows;
}

// Scales in memory as [blocks, rows].
TensorView scale_view(std::byte* data, int64_t rows, int64_t cols, Device where) {
  TensorView view =
      TensorView::contiguous(data, DType::kF32, {rows, cols / kActivationGroup}, where);
  view.strides = {1, rows};
  return view;
}

// Codes by their order: neighbours differ by one, -0 and +0 not at all.
int code_position(std::byte code) {
  const int magnitude = std::to_integer<int>(code) & 0x7F;
  return (std::to_integer<int>(code) & 0x80) != 0 ? -magnitude : magnitude;
}

std::string compare_codes(std::span<const std::byte> got, std::span<const std::byte> expected,
                          std::string& note) {
  size_t differing = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) continue;
    if (std::abs(code_position(got[i]) - code_position(expected[i])) > 1) {
      return fmt::format("code {} is {:#04x}, not {:#04x}", i, std::to_integer<int>(got[i]),
                         std::to_integer<int>(expected[i]));
    }
    ++differing;
  }
  const double share = static_cast<double>(differing) / static_cast<double>(got.size());
  note += fmt::format("{:.1e} of the codes differ by one step", share);
  return share <= kMaxDifferingCodes ? "" : "more codes differ than 8 %";
}

std::string compare_scales(std::span<const std::byte> got, std::span<const std::byte> expected,
                           std::string& note) {
  double largest = 0;
  for (size_t at = 0; at < got.size(); at += sizeof(float)) {
    if (std::memcmp(&got[at], &expected[at], sizeof(float)) == 0) continue;
    float a = 0;
    float b = 0;
    std::memcpy(&a, &got[at], sizeof(float));
    std::memcpy(&b, &expected[at], sizeof(float));
    const double difference = std::abs(static_cast<double>(a) - b) / std::abs(b);
    // NaN too: the comparison is false.
    if (!(difference <= kMaxScaleDifference)) {
      return fmt::format("scale {} is {}, not {}", at / sizeof(float), a, b);
    }
    largest = std::max(largest, difference);
  }
  note += fmt::format("; scales differ by up to {:.1e}", largest);
  return "";
}

std::string compare_activation(const WorkBuffer& buffer, std::span<const std::byte> got,
                               std::span<const std::byte> expected, std::string& note) {
  return buffer.name == "values" ? compare_codes(got, expected, note)
                                 : compare_scales(got, expected, note);
}

struct ActivationBuffer {
  enum : size_t {
    kValuesAt,
    kScalesAt,
    kMapAt,
    kInverseMapAt,
    kNumRowsAt,
    kInputAt,
    kInputScalesAt
  };
};

void add_fp8_input(int64_t rows, int64_t cols, RandomValues& values, Work& work) {
  const QuantizedLayout layout = quantized_layout(FormatId::kFp8Block1x128, rows, cols,
                                                  {.scale_layout = ScaleLayoutId::kLinear});
  Bytes codes(static_cast<size_t>(layout.values_bytes));
  std::vector<float> scales(static_cast<size_t>(layout.scale_count));
  const std::span<const std::byte> matrix = values.get(DType::kBF16, 0, rows * cols);
  quantize(TensorView::contiguous(matrix.data(), DType::kBF16, {rows, cols}),
           layout.bind(codes.data(), scales.data(), nullptr));
  const int64_t blocks = cols / kActivationGroup;
  std::vector<float> transposed(scales.size());
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      transposed[static_cast<size_t>(block * rows + row)] =
          scales[static_cast<size_t>(row * blocks + block)];
    }
  }
  using enum WorkBuffer::Role;
  const uint64_t code_bytes = codes.size();
  work.buffers.push_back({"input", kInput, code_bytes, std::move(codes)});
  work.buffers.push_back(
      {"input scales", kInput, transposed.size() * sizeof(float), bytes_of(transposed)});
}

// Counts the rows that the map names, and one map.
void count_bytes(const SweepCase& what, int64_t slots, Work& work) {
  const int64_t cols = what.cols;
  const int64_t input =
      what.activation.has_bf16_input ? 4 * cols : 2 * cols + 8 * cols / kActivationGroup;
  const int64_t output = cols + 4 * cols / kActivationGroup;
  work.read_bytes = static_cast<uint64_t>(slots * (input + 4) + 4);
  work.write_bytes = static_cast<uint64_t>(slots * output);
}

}  // namespace

Work make_activation_work(const SweepCase& what, RandomValues& values) {
  const ActivationShape& shape = what.activation;
  const int64_t inter = what.cols;
  const Rows sorted = sorted_rows(what.tokens, shape);
  const int64_t rows = sorted.num_rows;
  const auto slots = static_cast<int64_t>(sorted.slot_to_row.size());
  Work work;
  work.operation = "activation";
  work.has_baseline = true;
  work.elements = slots * inter;
  work.compare = compare_activation;
  count_bytes(what, slots, work);
  using enum WorkBuffer::Role;
  const auto size = static_cast<uint64_t>(rows * inter);
  work.buffers.push_back({"values", kOutput, size, {}});
  work.buffers.push_back({"scales", kOutput, size / kActivationGroup * sizeof(float), {}});
  const auto add_map = [&work](std::string_view name, const std::vector<int32_t>& map) {
    const uint64_t map_bytes = map.size() * sizeof(int32_t);
    work.buffers.push_back({std::string(name), kInput, map_bytes, bytes_of(map)});
  };
  add_map("map", sorted.slot_to_row);
  add_map("inverse map", sorted.row_to_slot);
  work.buffers.push_back(
      {"number of rows", kInput, sizeof(int32_t), bytes_of(std::vector{sorted.num_rows})});
  if (shape.has_bf16_input) {
    work.buffers.push_back({"input", kInput, 4 * size, {}, DType::kBF16});
  } else {
    add_fp8_input(rows, 2 * inter, values, work);
  }
  work.call = [rows, slots, inter, shape](Addresses at, Device where, Stream stream) {
    const bool is_bf16 = shape.has_bf16_input;
    ActivateArgs args;
    args.input.values =
        TensorView::contiguous(at[ActivationBuffer::kInputAt],
                               is_bf16 ? DType::kBF16 : DType::kF8E4M3, {rows, 2 * inter}, where);
    if (!is_bf16)
      args.input.scales = scale_view(at[ActivationBuffer::kInputScalesAt], rows, 2 * inter, where);
    args.slot_to_row =
        TensorView::contiguous(at[ActivationBuffer::kMapAt], DType::kI32, {slots}, where);
    if (shape.has_inverse_map) {
      args.row_to_slot =
          TensorView::contiguous(at[ActivationBuffer::kInverseMapAt], DType::kI32, {rows}, where);
    }
    args.num_rows =
        TensorView::contiguous(at[ActivationBuffer::kNumRowsAt], DType::kI32, {1}, where);
    args.format = RowFormat::kFp8Group;
    args.output.values = TensorView::contiguous(at[ActivationBuffer::kValuesAt], DType::kF8E4M3,
                                                {rows, inter}, where);
    args.output.scales = scale_view(at[ActivationBuffer::kScalesAt], rows, inter, where);
    activate(args, stream);
  };
  return work;
}

}  // namespace narrowfloat::cli

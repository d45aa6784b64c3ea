// cpu_reference: the oracle (moe spec 1.9, 6.4). Real is float (kFp32) or double (kFp64); every
// operator is one IEEE operation in Real. For row p of expert e and weight row n, 0 to begin with:
//   inner += x^[k] * w^[n, k]     k ascending in a group
//   total += factor * inner       factor = dA * dW, or the one there is; without: total = inner
//   a = w * total                 with slot weights
//   v = (scale[e] * row_scale) * a + bias     what is absent leaves its operation out
// x^ and w^ are code * block scale where the mode decodes with its scales, else the code. Rounded
// weights (moe spec 11.3) are 2^r * E4M3(code * scale * 2^-r), r the least with 6 * sfmax <= 448 *
// 2^r, or 0; sfmax is the largest magnitude of the row's scales in the group. Rows in int8 (moe
// spec 2.1) are rounded in fp32; w^ is doubled and dA halved.
#include <array>
#include <cmath>

#include "formats/minifloat.h"
#include "formats/ue8m0.h"
#include "ops/grouped_gemm/gemm_output.h"
#include "ops/grouped_gemm/gemm_shape.h"
#include "ops/grouped_gemm/int8_rows.h"
#include "ops/grouped_gemm/pack_weights.h"
#include "runtime/float_environment.h"

namespace narrowfloat {
namespace {

float decode_code(DType dtype, const void* codes, int64_t index) {
  const auto* codes8 = static_cast<const uint8_t*>(codes);
  if (dtype == DType::kF32) return static_cast<const float*>(codes)[index];
  if (dtype == DType::kBF16) return bf16_to_float(static_cast<const uint16_t*>(codes)[index]);
  if (dtype == DType::kF8E4M3) return E4M3::decode(codes8[index]);
  const int shift = index % 2 == 0 ? 0 : 4;
  return E2M1::decode(static_cast<uint8_t>((codes8[index / 2] >> shift) & 0xF));
}

float decode_scale(ScaleType type, const void* scales, int64_t index) {
  if (type == ScaleType::kF32) return static_cast<const float*>(scales)[index];
  const uint8_t code = static_cast<const uint8_t*>(scales)[index];
  return type == ScaleType::kUE8M0 ? UE8M0::decode(code) : E4M3::decode(code);
}

template <typename Real>
class ReferenceGemm {
 public:
  ReferenceGemm(const GroupedGemmProblem& problem, const GemmCall& call)
      : shape_(problem), call_(call) {}

  void run() const {
    for (int64_t tile = 0; tile < call_.tiles.count; ++tile) {
      for (int64_t p = tile * call_.tiles.token_tile; p < call_.tiles.row_ends[tile]; ++p) {
        for (int64_t n = 0; n < shape_.rows; ++n) {
          const Real value = with_epilogue(call_.tiles.experts[tile], n, p);
          store_result(call_.output_dtype, value, p * shape_.rows + n, call_.output);
        }
      }
    }
  }

 private:
  [[nodiscard]] Real weight_scale(int64_t e, int64_t n, int64_t k) const {
    const ScaleGrid& grid = shape_.weight_scales;
    const int64_t row = e * grid.rows + n / grid.block_rows;
    return decode_scale(grid.type, call_.weights + shape_.code_bytes(),
                        row * grid.blocks + k / grid.block_cols);
  }
  [[nodiscard]] Real input_scale(int64_t r, int64_t k) const {
    const int64_t block = k / shape_.input_scales.block_cols;
    return decode_scale(shape_.input_scales.type, call_.rows.scales,
                        r * call_.rows.scale_row_stride + block * call_.rows.scale_block_stride);
  }

  // 2^r of the group of 128 columns that contains k.
  [[nodiscard]] float rounding_unit(int64_t e, int64_t n, int64_t k) const {
    const int64_t first = k / 128 * 128;
    float largest = 0.0F;
    const int64_t end = std::min(first + 128, shape_.cols);
    for (int64_t i = first; i < end; i += shape_.weight_scales.block_cols) {
      const auto magnitude = std::abs(static_cast<float>(weight_scale(e, n, i)));
      if (magnitude > largest) largest = magnitude;
    }
    if (largest == 0.0F) return 1.0F;
    float unit = 0x1p-16F;  // Less than that of the least scale, 2^-9.
    while (6.0F * largest > 448.0F * unit) unit *= 2.0F;
    return unit;
  }

  [[nodiscard]] Real weight(int64_t e, int64_t n, int64_t k) const {
    const int64_t index = (e * shape_.rows + n) * shape_.cols + k;
    const Real code = decode_code(shape_.weights.dtype, call_.weights, index);
    if (shape_.mode.weight_scale != ScaleUse::kDecode) return code;
    const Real exact = code * weight_scale(e, n, k);
    if (!shape_.mode.rounds_weights) return exact;
    const float unit = rounding_unit(e, n, k);
    return unit * E4M3::decode(E4M3::encode(static_cast<float>(exact) / unit));
  }
  [[nodiscard]] Real input(int64_t r, int64_t k) const {
    const Real code = decode_code(call_.rows.dtype, call_.rows.values, r * shape_.cols + k);
    return shape_.mode.row_scale == ScaleUse::kDecode ? code * input_scale(r, k) : code;
  }

  [[nodiscard]] Real sum(int64_t e, int64_t n, int64_t r) const {
    Real total = 0;
    for (int64_t first = 0; first < shape_.cols; first += shape_.group_cols) {
      Real inner = 0;
      for (int64_t k = first; k < std::min(first + shape_.group_cols, shape_.cols); ++k) {
        inner = inner + input(r, k) * weight(e, n, k);
      }
      if (shape_.mode.row_scale != ScaleUse::kGroup) return inner;
      Real factor = input_scale(r, first);
      if (shape_.mode.weight_scale == ScaleUse::kGroup) factor *= weight_scale(e, n, first);
      total = total + factor * inner;
    }
    return total;
  }

  // The group of columns from `first` on lies in one block of int8.
  [[nodiscard]] Real int8_group(int64_t e, int64_t n, int64_t r, int64_t first) const {
    std::array<float, kInt8BlockCols> values{};
    const int64_t begin = first / kInt8BlockCols * kInt8BlockCols;
    const int64_t count = std::min(kInt8BlockCols, shape_.cols - begin);
    for (int64_t i = 0; i < count; ++i) {
      values[static_cast<size_t>(i)] =
          decode_code(call_.rows.dtype, call_.rows.values, r * shape_.cols + begin + i);
    }
    const Int8Block block = int8_block(values.data(), count);
    Real inner = 0;
    for (int64_t k = first; k < std::min(first + shape_.group_cols, shape_.cols); ++k) {
      inner =
          inner + int8_code(values[static_cast<size_t>(k - begin)], block) * (2 * weight(e, n, k));
    }
    Real factor = block.half_scale;
    factor *= weight_scale(e, n, first);
    return factor * inner;
  }

  [[nodiscard]] Real int8_sum(int64_t e, int64_t n, int64_t r) const {
    Real total = 0;
    for (int64_t first = 0; first < shape_.cols; first += shape_.group_cols) {
      total = total + int8_group(e, n, r, first);
    }
    return total;
  }

  [[nodiscard]] Real with_epilogue(int64_t e, int64_t n, int64_t p) const {
    const GemmEpilogue& epilogue = call_.epilogue;
    const int64_t r = call_.rows.source(p);
    Real a = shape_.mode.has_int8_rows ? int8_sum(e, n, r) : sum(e, n, r);
    if (epilogue.slot_weights != nullptr) {
      a = epilogue.slot_weights[epilogue.row_to_slot[p]] * a;
    }
    const bool gate = epilogue.gate_order && is_gate_row(*epilogue.gate_order, n, shape_.rows);
    Real factor = gate ? epilogue.gate_scale.of(e) : epilogue.scale.of(e);
    if (call_.rows.row_scale != nullptr) factor *= call_.rows.row_scale[r];
    const Real value = factor * a;
    if (epilogue.bias == nullptr) return value;
    return value + decode_code(epilogue.bias_dtype, epilogue.bias, e * shape_.rows + n);
  }

  const GemmShape shape_;
  const GemmCall& call_;
};

void run(const GroupedGemmProblem& problem, const GemmCall& call, Stream /*stream*/) {
  const FloatEnvironmentGuard guard;
  if (call.accumulation == Accumulation::kFp64) return ReferenceGemm<double>(problem, call).run();
  ReferenceGemm<float>(problem, call).run();
}

int64_t workspace_bytes(const GroupedGemmProblem& /*problem*/, int64_t /*a_rows*/,
                        Accumulation /*accumulation*/) {
  return 0;
}

Support supports(const GroupedGemmProblem& problem) { return cpu_only(problem.device); }

}  // namespace

const GroupedGemmImpl kGroupedGemmCpuReference{"cpu_reference",     supports,
                                               pack_linear_weights, workspace_bytes,
                                               supports_any_tiles,  no_fused_activation,
                                               no_dequantized_rows, run};

}  // namespace narrowfloat

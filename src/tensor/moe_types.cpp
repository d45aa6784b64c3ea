// The table of MoE modes and the names of their parts (moe spec 1.2).
#include "narrowfloat/moe_types.h"

#include <array>

#include "base/bad_enumerator.h"
#include "base/int_math.h"
#include "base/name_table.h"

namespace narrowfloat {
namespace {

constexpr std::array kModes{
    MoeModeInfo{MoeMode::kBf16, "bf16", "bf16 weights x bf16", WeightFormat::kBf16,
                RowFormat::kBf16, RowFormat::kBf16, 16, 16.0},
    MoeModeInfo{MoeMode::kFp8Tensor, "fp8_tensor", "FP8 with one scale an expert x FP8, static",
                WeightFormat::kFp8Tensor, RowFormat::kFp8Static, RowFormat::kFp8Static, 16, 8.0},
    MoeModeInfo{MoeMode::kFp8Block, "fp8_block", "FP8 128x128 x FP8 1x128 (DeepSeek)",
                WeightFormat::kFp8Block, RowFormat::kFp8Group, RowFormat::kFp8Group, 128,
                8.0 + 32.0 / 16384.0},
    MoeModeInfo{MoeMode::kMxfp8, "mxfp8", "MXFP8 x MXFP8", WeightFormat::kMxfp8, RowFormat::kMxfp8,
                RowFormat::kMxfp8, 32, 8.25},
    MoeModeInfo{MoeMode::kMxfp4Mxfp8, "mxfp4_mxfp8", "MXFP4 x MXFP8", WeightFormat::kMxfp4,
                RowFormat::kMxfp8, RowFormat::kMxfp8, 32, 4.25},
    MoeModeInfo{MoeMode::kMxfp4Bf16, "mxfp4_bf16", "MXFP4 x bf16 (W4A16)", WeightFormat::kMxfp4,
                RowFormat::kBf16, RowFormat::kBf16, 32, 4.25},
    MoeModeInfo{MoeMode::kMxfp4Fp8, "mxfp4_fp8", "MXFP4 x FP8 1x128 (W4A8)", WeightFormat::kMxfp4,
                RowFormat::kFp8Group, RowFormat::kFp8Group, 32, 4.25},
    MoeModeInfo{MoeMode::kNvfp4, "nvfp4", "NVFP4 x NVFP4, static global scales",
                WeightFormat::kNvfp4, RowFormat::kNvfp4, RowFormat::kNvfp4, 16, 4.5},
    MoeModeInfo{MoeMode::kNvfp4PerToken, "nvfp4_per_token", "NVFP4 x NVFP4, a scale per token",
                WeightFormat::kNvfp4, RowFormat::kNvfp4PerToken, RowFormat::kNvfp4PerToken, 16,
                4.5},
    MoeModeInfo{MoeMode::kNvfp4Bf16, "nvfp4_bf16", "NVFP4 x bf16 (W4A16)", WeightFormat::kNvfp4,
                RowFormat::kBf16, RowFormat::kBf16, 16, 4.5},
    MoeModeInfo{MoeMode::kNvfp4Fp8Exact, "nvfp4_fp8_exact", "NVFP4 x FP8 1x128 (W4A8)",
                WeightFormat::kNvfp4, RowFormat::kFp8Group, RowFormat::kFp8Group, 16, 4.5},
    MoeModeInfo{MoeMode::kNvfp4Fp8Rounded, "nvfp4_fp8_rounded",
                "NVFP4 rounded to E4M3 x FP8 1x128 (W4A8)", WeightFormat::kNvfp4,
                RowFormat::kFp8Group, RowFormat::kFp8Group, 16, 4.5},
    MoeModeInfo{MoeMode::kMxfp4Fp8Token, "mxfp4_fp8_token", "MXFP4 x FP8, a scale per token (W4A8)",
                WeightFormat::kMxfp4, RowFormat::kFp8Token, RowFormat::kFp8Token, 32, 4.25},
    MoeModeInfo{MoeMode::kNvfp4Fp8Token, "nvfp4_fp8_token",
                "NVFP4 rounded to E4M3 x FP8, a scale per token (W4A8)", WeightFormat::kNvfp4,
                RowFormat::kFp8Token, RowFormat::kFp8Token, 16, 4.5},
    MoeModeInfo{MoeMode::kMxfp4Int8, "mxfp4_int8", "MXFP4 x int8 1x32 (W4A8), on a CPU",
                WeightFormat::kMxfp4, RowFormat::kBf16, RowFormat::kBf16, 32, 4.25, true},
    MoeModeInfo{MoeMode::kNvfp4Int8, "nvfp4_int8", "NVFP4 x int8 1x32 (W4A8), on a CPU",
                WeightFormat::kNvfp4, RowFormat::kBf16, RowFormat::kBf16, 32, 4.5, true},
};

template <typename Enum>
struct EnumName {
  Enum id;
  std::string_view name;
};

constexpr std::array<EnumName<WeightFormat>, 6> kWeightFormats{{
    {WeightFormat::kBf16, "bf16"},
    {WeightFormat::kFp8Tensor, "fp8_tensor"},
    {WeightFormat::kFp8Block, "fp8_128x128"},
    {WeightFormat::kMxfp8, "mxfp8"},
    {WeightFormat::kMxfp4, "mxfp4"},
    {WeightFormat::kNvfp4, "nvfp4"},
}};

constexpr std::array<EnumName<RowFormat>, 8> kRowFormats{{
    {RowFormat::kBf16, "bf16"},
    {RowFormat::kFp32, "fp32"},
    {RowFormat::kFp8Static, "fp8_static"},
    {RowFormat::kFp8Group, "fp8_1x128"},
    {RowFormat::kMxfp8, "mxfp8"},
    {RowFormat::kNvfp4, "nvfp4"},
    {RowFormat::kNvfp4PerToken, "nvfp4_per_token"},
    {RowFormat::kFp8Token, "fp8_token"},
}};

constexpr std::array<EnumName<GateOrder>, 3> kGateOrders{{
    {GateOrder::kUpGate, "up_gate"},
    {GateOrder::kGateUp, "gate_up"},
    {GateOrder::kInterleaved, "interleaved"},
}};

}  // namespace

std::string_view name(WeightFormat format) {
  return record_of(kWeightFormats, format, "weight format").name;
}
std::string_view name(RowFormat format) {
  return record_of(kRowFormats, format, "row format").name;
}
std::string_view name(GateOrder order) { return record_of(kGateOrders, order, "gate order").name; }
GateOrder parse_gate_order(std::string_view text) {
  return parse_name(kGateOrders, text, "gate order");
}

std::span<const MoeModeInfo> all_moe_modes() { return kModes; }
const MoeModeInfo& moe_mode_info(MoeMode mode) { return record_of(kModes, mode, "MoE mode"); }
std::string_view name(MoeMode mode) { return moe_mode_info(mode).name; }
MoeMode parse_moe_mode(std::string_view text) {
  if (text == "nvfp4_fp8") return MoeMode::kNvfp4Fp8Exact;
  return parse_name(kModes, text, "mode");
}

int64_t scale_blocks(RowFormat format, int64_t cols) {
  switch (format) {
    case RowFormat::kBf16:
    case RowFormat::kFp32:
    case RowFormat::kFp8Static:
    case RowFormat::kFp8Token:
      return 0;
    case RowFormat::kFp8Group:
      return ceil_div(cols, 128);
    case RowFormat::kMxfp8:
      return ceil_div(cols, 32);
    case RowFormat::kNvfp4:
    case RowFormat::kNvfp4PerToken:
      return ceil_div(cols, 16);
  }
  throw_bad_enumerator("row format", static_cast<int>(format));
}

}  // namespace narrowfloat

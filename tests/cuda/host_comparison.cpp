// See host_comparison.h.
#include "cuda/host_comparison.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "narrowfloat/error.h"
#include "support/device_copies.h"

namespace narrowfloat::testing {
namespace {

constexpr auto kBothModes = {MathMode::kExact, MathMode::kFast};

class Collector {
 public:
  void add(std::string_view what, const QuantizeTo& to) {
    const ScaleLayoutId layout = to.layout.value_or(format_info(to.format).default_layout);
    variants.push_back(
        {fmt::format("{} {} {} {}", name(to.format), name(layout), name(to.options.math), what),
         to});
  }

  // The eight forms of 4-over-6.
  void add_four_over_six(QuantizeTo to) {
    for (const auto error : {FourOverSixError::kMae, FourOverSixError::kMse}) {
      for (const auto math : {FourOverSixMath::kStrict, FourOverSixMath::kFast}) {
        for (const int e4m3_max : {448, 256}) {
          to.options.four_over_six = {
              .enabled = true, .error = error, .error_math = math, .e4m3_max = e4m3_max};
          add(fmt::format("4/6 error {} math {} max {}", static_cast<int>(error),
                          static_cast<int>(math), e4m3_max),
              to);
        }
      }
    }
  }

  void add_nvfp4(QuantizeTo to) {
    to.format = FormatId::kNvfp4;
    add("amax", to);
    add_four_over_six(to);
    for (const float scale :
         {1.0F, 37.25F, 0x1.234566p-9F, 0x1p126F, 0x1.000002p126F, 0x1p-140F, 0x1.fffffep127F}) {
      to.options.encode_scale = scale;
      add(fmt::format("encode {:a}", scale), to);
    }
    to.options.encode_scale.reset();
    to.format = FormatId::kNvfp4PerToken;
    add("", to);
    add_four_over_six(to);
    to.options.base_decode_scale = 1.0F / 1536.0F;
    add("base 1/1536", to);
  }

  void add_mx(QuantizeTo to) {
    for (const auto format : {FormatId::kMxfp4, FormatId::kMxfp8}) {
      to.format = format;
      for (const auto rounding :
           {Ue8m0Rounding::kUp, Ue8m0Rounding::kFloor, Ue8m0Rounding::kEven}) {
        to.options.mx_scale = rounding;
        add(name(rounding), to);
      }
    }
  }

  void add_fp8(QuantizeTo to) {
    for (const auto format :
         {FormatId::kFp8Block1x128, FormatId::kFp8Block128x128, FormatId::kFp8Tensor}) {
      to.format = format;
      for (const auto rule : {Fp8ScaleRule::kReciprocal, Fp8ScaleRule::kReciprocalPow2,
                              Fp8ScaleRule::kAmaxDiv, Fp8ScaleRule::kPow2Ceil}) {
        to.options.fp8_rule = rule;
        add(name(rule), to);
      }
    }
    to.options.fp8_rule = Fp8ScaleRule::kReciprocal;
    to.options.fp8_decode_scale = 0x1.8ccccep-7F;
    add("given scale", to);
  }

  std::vector<QuantizeVariant> variants;
};

int64_t count_differences(std::span<const uint8_t> a, std::span<const uint8_t> b) {
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += a[i] != b[i] ? 1 : 0;
  return count;
}

// The input elements around a value byte, as bits.
std::string input_around(const Matrix& input, const QuantizedLayout& layout, int64_t value_byte) {
  const int64_t per_byte = format_info(layout.format).element_bits == 4 ? 2 : 1;
  const int64_t row = value_byte * per_byte / std::max<int64_t>(1, layout.value_cols);
  const int64_t col = value_byte * per_byte % std::max<int64_t>(1, layout.value_cols);
  std::vector<std::string> bits;
  for (int64_t i = col / 16 * 16; i < std::min(col / 16 * 16 + 16, input.shape().cols); ++i) {
    bits.push_back(fmt::format("{:a}", input.at(row, i)));
  }
  return fmt::format("row {} column {}, input from column {}: {}", row, col, col / 16 * 16,
                     fmt::join(bits, " "));
}

std::string buffer_difference(std::string_view what, const GuardedBuffer& expected,
                              const GuardedBuffer& actual) {
  const auto e = expected.span();
  const auto a = actual.span();
  const auto [at_e, at_a] = std::ranges::mismatch(e, a);
  if (at_e == e.end()) return {};
  const auto first = static_cast<size_t>(at_e - e.begin());
  const size_t count = std::min<size_t>(8, e.size() - first);
  return fmt::format("{}: {} of {} bytes differ, first {}: {::#04x}, expected {::#04x}", what,
                     count_differences(e, a), e.size(), first, a.subspan(first, count),
                     e.subspan(first, count));
}

std::string first_difference(const Matrix& input, const QuantizedTensor& expected,
                             const QuantizedTensor& actual) {
  std::string text = buffer_difference("global_scale", expected.global_scale, actual.global_scale);
  for (const std::string& part : {buffer_difference("scales", expected.scales, actual.scales),
                                  buffer_difference("values", expected.values, actual.values)}) {
    if (!part.empty()) text += (text.empty() ? "" : "\n  ") + part;
  }
  const auto e = expected.values.span();
  const auto [at, other] = std::ranges::mismatch(e, actual.values.span());
  if (at != e.end()) text += "\n  " + input_around(input, expected.layout, at - e.begin());
  return text;
}

}  // namespace

std::vector<QuantizeVariant> all_variants() {
  Collector collector;
  for (const MathMode math : kBothModes) {
    const QuantizeTo to{.layout = ScaleLayoutId::kLinear, .options = {.math = math}};
    collector.add_nvfp4(to);
    collector.add_mx(to);
    collector.add_fp8(to);
  }
  return collector.variants;
}

std::vector<QuantizeVariant> default_variants() {
  Collector collector;
  for (const FormatInfo& info : all_formats()) {
    for (int layout = 0; layout < 4; ++layout) {
      const auto id = static_cast<ScaleLayoutId>(layout);
      if (!info.allows(id)) continue;
      for (const MathMode math : kBothModes) {
        collector.add("", {.format = info.id, .layout = id, .options = {.math = math}});
      }
    }
  }
  return collector.variants;
}

std::string compare_with_host(const Matrix& input, const QuantizeVariant& variant,
                              const std::vector<float>& encode_scales) {
  const Vector scales = Vector::of(DType::kF32, encode_scales);
  QuantizeTo to = variant.to;
  if (!encode_scales.empty()) to.options.encode_scales = scales.view();
  const QuantizedTensor expected = quantized(input, to);
  const QuantizedTensor output(expected.layout, {}, expected.layout.global_scales);
  const DeviceCopies device(
      {&input.buffer(), &scales.buffer(), &output.values, &output.scales, &output.global_scale});
  to.options.encode_scales = device.view(to.options.encode_scales);
  quantize(device.view(input.view()), device.view(output.view), to.options, device.stream());
  if (!device.take_back()) return "a canary was overwritten";
  return first_difference(input, expected, output);
}

}  // namespace narrowfloat::testing

// Conversions on bits: the types are small enough to need no arithmetic but one exact ldexp.
#include "cli/float_tensors.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

float float_from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16U);
}

float float_from_f16(uint16_t bits) {
  const int exponent = bits >> 10U & 0x1F;
  const int fraction = bits & 0x3FF;
  const float sign = (bits & 0x8000U) != 0 ? -1.0F : 1.0F;
  if (exponent == 0x1F) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    return fraction == 0 ? sign * kInfinity : std::numeric_limits<float>::quiet_NaN();
  }
  const int significand = exponent == 0 ? fraction : fraction | 0x400;
  return sign * std::ldexp(static_cast<float>(significand), std::max(exponent, 1) - 25);
}

template <typename Word, typename Convert>
std::vector<float> converted(std::span<const std::byte> bytes, Convert convert) {
  std::vector<float> values(bytes.size() / sizeof(Word));
  for (size_t i = 0; i < values.size(); ++i) {
    Word word{};
    std::memcpy(&word, bytes.data() + i * sizeof(Word), sizeof(Word));
    values[i] = convert(word);
  }
  return values;
}

bool is_plain(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

}  // namespace

std::vector<float> to_floats(std::span<const std::byte> bytes, DType dtype) {
  if (dtype == DType::kF32) return converted<float>(bytes, [](float value) { return value; });
  if (dtype == DType::kBF16) return converted<uint16_t>(bytes, float_from_bf16);
  if (dtype == DType::kF16) return converted<uint16_t>(bytes, float_from_f16);
  throw Error(ErrorKind::kUnsupported,
              fmt::format("expected BF16, F16 or F32 values, got {}", name(dtype)));
}

std::vector<uint16_t> to_bf16(std::span<const float> values) {
  std::vector<uint16_t> words(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const auto bits = std::bit_cast<uint32_t>(values[i]);
    const uint32_t rounded =
        std::isnan(values[i]) ? bits | 1U << 22U : bits + 0x7FFFU + (bits >> 16U & 1U);
    words[i] = static_cast<uint16_t>(rounded >> 16U);
  }
  return words;
}

std::vector<float> read_floats(const SafetensorsReader& file, const TensorInfo& tensor) {
  return read_floats(file, tensor, tensor.size_bytes);
}

std::vector<float> read_floats(const SafetensorsReader& file, const TensorInfo& tensor,
                               uint64_t size_bytes) {
  if (!is_plain(tensor.dtype)) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("{}: tensor '{}': expected BF16, F16 or F32, got {}",
                            printable(file.path()), printable(tensor.name), name(tensor.dtype)));
  }
  std::vector<std::byte> bytes(size_bytes);
  file.read(tensor, 0, bytes);
  return to_floats(bytes, tensor.dtype);
}

}  // namespace narrowfloat::cli

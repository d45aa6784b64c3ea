// Numbers are read with from_chars, which knows no locale and reports overflow.
#include "cli/size_text.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

std::string to_lower(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return lower;
}

// The text is quoted as it is: whoever prints the message escapes it.
[[noreturn]] void refuse(std::string_view text, std::string_view expected) {
  throw Error(ErrorKind::kInvalidArgument, fmt::format("got '{}', expected {}", text, expected));
}

// Suffixes in lower case and what they multiply by.
struct Unit {
  std::string_view suffix;
  double factor;
};
constexpr double kKi = 1024;
constexpr std::array<Unit, 14> kUnits = {{{"", 1},
                                          {"b", 1},
                                          {"k", 1e3},
                                          {"kb", 1e3},
                                          {"kib", kKi},
                                          {"m", 1e6},
                                          {"mb", 1e6},
                                          {"mib", kKi* kKi},
                                          {"g", 1e9},
                                          {"gb", 1e9},
                                          {"gib", kKi* kKi* kKi},
                                          {"t", 1e12},
                                          {"tb", 1e12},
                                          {"tib", kKi* kKi* kKi* kKi}}};

int64_t parse_extent(std::string_view digits, std::string_view whole) {
  int64_t value = 0;
  const char* const end = digits.data() + digits.size();
  const auto result = std::from_chars(digits.data(), end, value);
  if (result.ec != std::errc{} || result.ptr != end || value < 0) {
    refuse(whole, "rows x columns such as 4096x4096");
  }
  return value;
}

}  // namespace

std::string format_bytes(uint64_t size_bytes) {
  if (size_bytes < 1000) return fmt::format("{} B", size_bytes);
  constexpr std::array<std::string_view, 6> kNames = {"kB", "MB", "GB", "TB", "PB", "EB"};
  double value = static_cast<double>(size_bytes) / 1000;
  size_t unit = 0;
  // 999.995 would be printed as 1000.00.
  while (value >= 999.995 && unit + 1 < kNames.size()) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{:.2f} {}", value, kNames[unit]);
}

uint64_t parse_bytes(std::string_view text) {
  constexpr std::string_view kExpected =
      "a size such as 500M (powers of 1000: K, M, G, T) or 2GiB (powers of 1024: KiB, MiB, GiB, "
      "TiB)";
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value, std::chars_format::fixed);
  if (result.ec != std::errc{} || std::signbit(value)) refuse(text, kExpected);
  std::string_view suffix(result.ptr, static_cast<size_t>(end - result.ptr));
  while (suffix.starts_with(' ')) suffix.remove_prefix(1);
  const std::string lower = to_lower(suffix);
  const auto unit = std::find_if(kUnits.begin(), kUnits.end(),
                                 [&](const Unit& candidate) { return candidate.suffix == lower; });
  if (unit == kUnits.end()) refuse(text, kExpected);
  const double size = value * unit->factor;
  // Also refuses "inf" and "nan", which from_chars reads.
  if (!(size < 0x1p63)) refuse(text, "a size below 2^63 bytes");
  return static_cast<uint64_t>(std::llround(size));
}

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  if (seconds < 10) return fmt::format("{:.2f} s", seconds);
  if (seconds < 60) return fmt::format("{:.1f} s", seconds);
  constexpr double kLongest = 1e9;  // Beyond it nobody waits, and the conversion stays defined.
  const auto whole = static_cast<int64_t>(std::min(seconds, kLongest));
  if (whole < 3600) return fmt::format("{}m {:02}s", whole / 60, whole % 60);
  return fmt::format("{}h {:02}m", whole / 3600, whole / 60 % 60);
}

std::string format_fixed(double value, int decimals) {
  std::string text = fmt::format("{:.{}f}", value, decimals);
  if (text.starts_with('-') && text.find_first_not_of("-0.") == std::string::npos) text.erase(0, 1);
  return text;
}

std::string format_shape(std::span<const int64_t> shape) {
  return shape.empty() ? "scalar" : fmt::format("{}", fmt::join(shape, "x"));
}

MatrixShape parse_shape(std::string_view text) {
  const size_t cross = text.find_first_of("xX");
  if (cross == std::string_view::npos) refuse(text, "rows x columns such as 4096x4096");
  return {parse_extent(text.substr(0, cross), text), parse_extent(text.substr(cross + 1), text)};
}

MatrixShape parse_nonempty_shape(std::string_view text) {
  const MatrixShape shape = parse_shape(text);
  if (shape.rows == 0 || shape.cols == 0) refuse(text, "at least one row and one column");
  return shape;
}

DType parse_dtype_option(std::string_view text) {
  const std::string lower = to_lower(text);
  if (lower == "bf16") return DType::kBF16;
  if (lower == "fp16") return DType::kF16;
  if (lower == "fp32") return DType::kF32;
  if (const std::optional<DType> dtype = parse_dtype(text)) return *dtype;
  refuse(text, "bf16, fp16 or fp32");
}

int64_t parse_count(std::string_view text, int64_t low, int64_t high, std::string_view expected) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc{} || result.ptr != end || value < low || value > high) {
    refuse(text, expected);
  }
  return value;
}

std::vector<int64_t> parse_count_list(std::string_view text, int64_t high,
                                      std::string_view expected) {
  std::vector<int64_t> counts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    counts.push_back(parse_count(text.substr(begin, comma - begin), 1, high, expected));
    begin = comma + 1;
  }
  return counts;
}

Device parse_device(std::string_view text) {
  if (text == "cpu") return {};
  if (text == "cuda") return {DeviceType::kCuda, 0};
  constexpr std::string_view kCuda = "cuda:";
  if (text.starts_with(kCuda)) {
    const std::string_view digits = text.substr(kCuda.size());
    const char* const end = digits.data() + digits.size();
    Device device{DeviceType::kCuda, 0};
    const auto result = std::from_chars(digits.data(), end, device.index);
    if (result.ec == std::errc{} && result.ptr == end && device.index >= 0) return device;
  }
  refuse(text, "cpu or cuda:N, N counted from 0");
}

}  // namespace narrowfloat::cli

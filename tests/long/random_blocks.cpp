// random_blocks [--blocks N] [--values N] [--jobs N] [--seed N] [--format NAME]... [--dequantize]
//
// Quantizes random blocks with every implementation for the CPU and compares all bytes with those
// of cpu_reference: --blocks for each format whose blocks have 16 or 32 elements, --values elements
// for each of the others. With --dequantize the blocks are random codes and scales, and what is
// compared are the values. A batch is a matrix whose options, types, layouts and distribution of
// values are drawn from its number, so that a report of a difference is all one needs to repeat it.
//
// tools/long_tests.sh runs it for hours; a test runs a few batches.
#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "base/float_ops.h"
#include "narrowfloat/narrowfloat.h"
#include "ops/dequantize/dequantize_problem.h"
#include "ops/quantize/quantize_checks.h"
#include "runtime/float_environment.h"
#include "support/random.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kRows = 128;  // A whole tile of every layout and of 128 x 128 blocks.
constexpr int64_t kCols = 512;

struct Options {
  uint64_t blocks = 1 << 20;
  uint64_t values = 1 << 24;
  uint64_t seed = 1;
  int jobs = 1;
  bool dequantizes = false;
  std::vector<FormatId> formats;
};

// Element type by its fields.
struct Fields {
  int exponent_bits;
  int mantissa_bits;
};
Fields fields_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return {8, 23};
    case DType::kF16:
      return {5, 10};
    case DType::kF8E4M3:
      return {4, 3};
    default:
      return {8, 7};
  }
}

// Fills one row. A row has a range of exponents of its own, and in some rows mantissas of few bits
// (so that ties and equal magnitudes are frequent), zeros, or NaN and infinities. Some rows have
// any bits.
template <typename Word>
void fill_row(Word* row, const Fields& fields, int middle, Random& random) {
  const auto choice = static_cast<uint32_t>(random.bits());
  const int sign_shift = fields.exponent_bits + fields.mantissa_bits;
  const uint32_t exponents = (1U << fields.exponent_bits) - 1;
  const uint32_t mantissas = (1U << fields.mantissa_bits) - 1;
  const uint32_t spread = (1U << (choice % 5)) - 1;
  const auto base = static_cast<uint32_t>(middle + static_cast<int>(choice >> 8 & 7U) - 4);
  uint32_t mask = mantissas;
  if ((choice >> 12) % 4 == 0) mask &= ~(mantissas >> (1 + (choice >> 16) % 4));
  const bool has_any_bits = (choice >> 20) % 16 == 0;
  for (int64_t i = 0; i < kCols; i += 2) {
    uint64_t word = random.bits();
    for (int half = 0; half < 2; ++half, word >>= 32) {
      const auto bits = static_cast<uint32_t>(word);
      const uint32_t sign = bits >> 31;
      const uint32_t exponent = (base + (bits >> 25 & spread)) & exponents;
      row[i + half] = static_cast<Word>(
          has_any_bits ? bits >> (31 - sign_shift)
                       : sign << sign_shift | exponent << fields.mantissa_bits | (bits & mask));
    }
  }
  const uint32_t extra = (choice >> 24) % 8;
  if (extra == 0) {  // Whole blocks, and some elements, of zeros.
    std::fill_n(row + 64 * (choice >> 27 & 3U), 64, Word{0});
    for (int64_t i = 256; i < kCols; i += 3) row[i] = 0;
  } else if (extra == 1) {
    for (int i = 0; i < 3; ++i) {
      const bool is_nan = random.chance(50);
      row[random.range(0, kCols - 1)] = static_cast<Word>(
          exponents << fields.mantissa_bits | (is_nan ? 1U + random.bits32() % mantissas : 0U));
    }
  }
}

void fill_rows(std::vector<std::byte>& out, DType dtype, int middle, Random& random) {
  const Fields fields = fields_of(dtype);
  for (int64_t row = 0; row < kRows; ++row) {
    std::byte* at = out.data() + row * kCols * (bits(dtype) / 8);
    if (dtype == DType::kF32) {
      fill_row(reinterpret_cast<uint32_t*>(at), fields, middle, random);
    } else if (dtype == DType::kF8E4M3) {
      fill_row(reinterpret_cast<uint8_t*>(at), fields, middle, random);
    } else {
      fill_row(reinterpret_cast<uint16_t*>(at), fields, middle, random);
    }
  }
}

// Buffers of a quantized matrix in one piece, so that one comparison covers all of them.
class Coded {
 public:
  explicit Coded(const QuantizedLayout& layout)
      : layout_(layout),
        scales_at_(round_up8(layout.values_bytes)),
        global_at_(scales_at_ + round_up8(layout.scales_bytes)),
        bytes_(static_cast<size_t>(global_at_ + 4 * layout.global_scales)) {}

  // Starts from bytes that no result may keep, other ones for each implementation.
  QuantizedView view(uint8_t poison) {
    const auto begin = bytes_.begin();
    std::fill(begin, bytes_.end(), std::byte{poison});
    // Gaps between the buffers belong to nobody.
    std::fill(begin + layout_.values_bytes, begin + scales_at_, std::byte{0});
    std::fill(begin + scales_at_ + layout_.scales_bytes, begin + global_at_, std::byte{0});
    return view();
  }
  QuantizedView view() {
    return layout_.bind(bytes_.data(), bytes_.data() + scales_at_,
                        reinterpret_cast<float*>(bytes_.data() + global_at_));
  }
  [[nodiscard]] const std::vector<std::byte>& bytes() const { return bytes_; }
  [[nodiscard]] std::vector<std::byte>& bytes() { return bytes_; }

 private:
  static int64_t round_up8(int64_t size) { return (size + 7) / 8 * 8; }

  QuantizedLayout layout_;
  int64_t scales_at_;
  int64_t global_at_;
  std::vector<std::byte> bytes_;
};

ScaleLayoutId any_layout(const FormatInfo& info, Random& random) {
  for (;;) {
    const auto layout = static_cast<ScaleLayoutId>(random.range(0, 3));
    if (info.allows(layout)) return layout;
  }
}

QuantizeOptions any_options(const FormatInfo& info, DType dtype, int middle, Random& random) {
  QuantizeOptions options;
  options.math = random.chance(50) ? MathMode::kExact : MathMode::kFast;
  const bool is_fp8_input = dtype == DType::kF8E4M3;
  if (info.id == FormatId::kNvfp4 || (info.id == FormatId::kMxfp4 && is_fp8_input)) {
    if (random.chance(90)) {
      // Block maxima times this are about 2^-12 to 2^16: scales from underflow to saturation.
      const int bias = (1 << (fields_of(dtype).exponent_bits - 1)) - 1;
      const int exponent = static_cast<int>(random.range(-12, 16)) - (middle - bias);
      const float mantissa = 1.0F + static_cast<float>(random.bits() & 0xFFFFU) * 0x1p-16F;
      options.encode_scale = mantissa * power_of_two(std::clamp(exponent, -126, 126));
    }
  }
  if (info.has_global_scale && !is_fp8_input && random.chance(30)) {
    options.four_over_six = {true, random.pick({FourOverSixError::kMae, FourOverSixError::kMse}),
                             random.pick({FourOverSixMath::kStrict, FourOverSixMath::kFast}),
                             random.pick({448, 256})};
  }
  if (info.scale_type == ScaleType::kUE8M0 && !is_fp8_input) {
    options.mx_scale =
        random.pick({Ue8m0Rounding::kUp, Ue8m0Rounding::kFloor, Ue8m0Rounding::kEven});
  }
  if (info.scale_type == ScaleType::kF32) {
    options.fp8_rule = random.pick({Fp8ScaleRule::kReciprocal, Fp8ScaleRule::kReciprocalPow2,
                                    Fp8ScaleRule::kAmaxDiv, Fp8ScaleRule::kPow2Ceil});
    const bool takes_eps =
        options.math == MathMode::kExact || options.fp8_rule != Fp8ScaleRule::kReciprocal;
    if (takes_eps && random.chance(20)) options.fp8_eps = random.pick({1e-30F, 1e-4F, 1.0F});
  }
  return options;
}

// A comparison of the reference and the others on the same problem.
struct Outcome {
  std::vector<std::string_view> compared;  // Names of the implementations.
  std::string difference;                  // Empty if there is none.
};

constexpr std::string_view kReference = "cpu_reference";

Outcome run_quantize(FormatId format, uint64_t number) {
  Random random(number);
  const FormatInfo& info = format_info(format);
  const bool is_fp4 = info.element_bits == 4 && !info.has_row_scale;
  const DType dtype = random.chance(50)              ? DType::kBF16
                      : random.chance(50)            ? DType::kF32
                      : random.chance(70) || !is_fp4 ? DType::kF16
                                                     : DType::kF8E4M3;
  const Fields fields = fields_of(dtype);
  const auto middle = static_cast<int>(random.range(6, (1 << fields.exponent_bits) - 6));
  std::vector<std::byte> input(static_cast<size_t>(kRows * kCols * (bits(dtype) / 8)));
  fill_rows(input, dtype, middle, random);
  const QuantizeOptions options = any_options(info, dtype, middle, random);
  const QuantizedLayout layout =
      quantized_layout(format, kRows, kCols, {.scale_layout = any_layout(info, random)});
  const TensorView rows = TensorView::contiguous(input.data(), dtype, {kRows, kCols});

  const FloatEnvironmentGuard guard;
  Outcome outcome;
  Coded expected(layout);
  const auto run = [&](const QuantizeImpl& impl, Coded& coded, uint8_t poison) {
    const LoweredQuantize lowered =
        lower({.input = rows, .output = coded.view(poison), .options = options});
    if (!impl.supports(lowered.problem).ok()) return false;
    impl.run(lowered.problem, lowered.args, {});
    return true;
  };
  const std::span<const QuantizeImpl> impls = quantize_impls();
  if (impls.back().name != kReference || !run(impls.back(), expected, 0x55)) {
    outcome.difference = "cpu_reference is not the last of the list or takes not every problem";
    return outcome;
  }
  Coded coded(layout);
  for (const QuantizeImpl& impl : impls.first(impls.size() - 1)) {
    if (!run(impl, coded, 0xAA)) continue;
    outcome.compared.push_back(impl.name);
    if (coded.bytes() == expected.bytes()) continue;
    outcome.difference =
        fmt::format("{} and {} quantize batch {} of {} ({}, {}) differently", impl.name, kReference,
                    number, info.name, name(dtype), name(options.math));
  }
  return outcome;
}

Outcome run_dequantize(FormatId format, uint64_t number) {
  Random random(number);
  const FormatInfo& info = format_info(format);
  const DType dtype = random.pick({DType::kBF16, DType::kF32, DType::kF16});
  const QuantizedLayout layout =
      quantized_layout(format, kRows, kCols, {.scale_layout = any_layout(info, random)});
  Coded coded(layout);
  QuantizedView view = coded.view(0);
  for (size_t i = 0; i + 8 <= coded.bytes().size(); i += 8) {
    const uint64_t word = random.bits();
    std::memcpy(coded.bytes().data() + i, &word, 8);
  }
  // Any bits are scales, but few of those of fp32 give numbers in the range of fp16.
  const auto tame = [&](void* data, int64_t count) {
    auto* values = static_cast<float*>(data);
    for (int64_t i = 0; i < count; ++i) {
      if (random.chance(95)) values[i] = std::abs(random.normal()) * power_of_two(-6);
    }
  };
  if (info.scale_type == ScaleType::kF32) tame(view.scales.data, layout.scale_count);
  tame(view.global_scale.data, layout.global_scales);
  DequantizeOptions options;
  options.global_scale_divides = info.has_global_scale && random.chance(25);

  DequantizeProblem problem{.format = format,
                            .layout = layout.scale_layout,
                            .output = dtype,
                            .rows = kRows,
                            .cols = kCols,
                            .global_scale_divides = options.global_scale_divides};
  if (info.has_global_scale) problem.global_axis = GlobalScaleAxis::kTensor;
  if (info.has_row_scale) problem.global_axis = GlobalScaleAxis::kBatchRow;
  const FloatEnvironmentGuard guard;
  Outcome outcome;
  const auto run = [&](const DequantizeImpl& impl, std::vector<std::byte>& out, uint8_t poison) {
    std::fill(out.begin(), out.end(), std::byte{poison});
    if (!impl.supports(problem).ok()) return false;
    impl.run(problem,
             {.values = static_cast<const uint8_t*>(view.values.data),
              .value_row_bytes = view.values.shape[2],
              .scales = view.scales,
              .global_scale = static_cast<const float*>(view.global_scale.data),
              .output = out.data(),
              .output_stride = kCols},
             {});
    return true;
  };
  const std::span<const DequantizeImpl> impls = dequantize_impls();
  std::vector<std::byte> expected(static_cast<size_t>(kRows * kCols * (bits(dtype) / 8)));
  if (impls.back().name != kReference || !run(impls.back(), expected, 0x55)) {
    outcome.difference = "cpu_reference is not the last of the list or takes not every problem";
    return outcome;
  }
  std::vector<std::byte> values(expected.size());
  for (const DequantizeImpl& impl : impls.first(impls.size() - 1)) {
    if (!run(impl, values, 0xAA)) continue;
    outcome.compared.push_back(impl.name);
    if (values == expected) continue;
    outcome.difference = fmt::format("{} and {} dequantize batch {} of {} to {} differently",
                                     impl.name, kReference, number, info.name, name(dtype));
  }
  return outcome;
}

// Runs the batches of one format on several threads; false after a difference.
bool run_format(const Options& options, const FormatInfo& info) {
  const bool counts_blocks = info.block_rows == 1 && info.block_cols <= 32;
  const int64_t unit = counts_blocks ? info.block_cols : 1;
  const uint64_t wanted = counts_blocks ? options.blocks : options.values;
  const auto per_batch = static_cast<uint64_t>(kRows * kCols / unit);
  const uint64_t num_batches = (wanted + per_batch - 1) / per_batch;
  std::atomic<uint64_t> next = 0;
  std::atomic<bool> is_equal = true;
  std::mutex mutex;
  std::map<std::string_view, uint64_t> batches_of;  // Key: implementation.
  const auto work = [&] {
    for (uint64_t batch = next++; batch < num_batches && is_equal; batch = next++) {
      // Seeds far apart: batches of two seeds are not the same.
      const uint64_t number = options.seed << 40 | batch;
      Outcome outcome;
      try {
        outcome =
            options.dequantizes ? run_dequantize(info.id, number) : run_quantize(info.id, number);
      } catch (const std::exception& error) {
        outcome.difference = fmt::format("batch {} of {}: {}", number, info.name, error.what());
      }
      const std::lock_guard lock(mutex);
      for (const std::string_view name : outcome.compared) ++batches_of[name];
      if (outcome.difference.empty()) continue;
      is_equal = false;
      std::fprintf(stderr, "random_blocks: %s\n", outcome.difference.c_str());
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < options.jobs; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  for (const auto& [implementation, batches] : batches_of) {
    const std::string line =
        fmt::format("{} {} {}: {} {} (seed {}), {} mismatches\n",
                    options.dequantizes ? "dequantize" : "quantize", info.name, implementation,
                    batches * per_batch, counts_blocks ? "blocks" : "values", options.seed,
                    is_equal ? "0" : "some");
    std::fputs(line.c_str(), stdout);
  }
  std::fflush(stdout);
  return is_equal && !batches_of.empty();
}

uint64_t parse_number(std::string_view text) {
  uint64_t value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc{} || result.ptr != text.data() + text.size()) {
    throw Error(ErrorKind::kInvalidArgument, fmt::format("'{}' is not a number", text));
  }
  return value;
}

Options parse(std::span<const std::string_view> words) {
  Options options;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--dequantize") {
      options.dequantizes = true;
      continue;
    }
    if (i + 1 == words.size()) {
      throw Error(ErrorKind::kInvalidArgument, fmt::format("'{}': no value", words[i]));
    }
    const std::string_view option = words[i];
    const std::string_view value = words[++i];
    if (option == "--format") {
      options.formats.push_back(parse_format(value));
    } else if (option == "--blocks") {
      options.blocks = parse_number(value);
    } else if (option == "--values") {
      options.values = parse_number(value);
    } else if (option == "--seed") {
      options.seed = parse_number(value);
    } else if (option == "--jobs") {
      options.jobs = static_cast<int>(std::clamp<uint64_t>(parse_number(value), 1, 256));
    } else {
      throw Error(ErrorKind::kInvalidArgument, fmt::format("'{}': no such option", option));
    }
  }
  return options;
}

int run(std::span<const std::string_view> words) {
  const Options options = parse(words);
  set_num_threads(1);  // Each batch is the work of one thread.
  bool is_equal = true;
  for (const FormatInfo& info : all_formats()) {
    const bool is_wanted =
        options.formats.empty() ||
        std::find(options.formats.begin(), options.formats.end(), info.id) != options.formats.end();
    if (is_wanted) is_equal = run_format(options, info) && is_equal;
  }
  return is_equal ? 0 : 1;
}

}  // namespace
}  // namespace narrowfloat::testing

int main(int argc, char** argv) {
  try {
    const std::vector<std::string_view> words(argv + 1, argv + argc);
    return narrowfloat::testing::run(words);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "random_blocks: error: %s\n", error.what());
    return 2;
  }
}

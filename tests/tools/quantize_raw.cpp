// Quantizes a file of raw tensor bytes through the public API and writes the raw result, so that
// the Python tests can compare the library with independent implementations:
//   quantize_raw --format nvfp4 --layout linear --rows M --cols K [options] IN.bin OUT_PREFIX
// reads batch * rows * cols elements and writes OUT_PREFIX.values, .scales and .global. The output
// buffers start as 0xCC, so bytes that the library does not write are visible.
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "narrowfloat/narrowfloat.h"

namespace nf = narrowfloat;

namespace {

struct Arguments {
  std::string format, layout, impl, input, output, eps, base_decode_scale, fp8_decode_scale;
  std::string math = "exact", dtype = "BF16", rounding = "up", rule = "reciprocal";
  int64_t batch = 1, rows = 0, cols = 0, alignment = 32;
  std::vector<std::string> encode_scales, four_over_six;
  std::vector<int32_t> row_list, valid_rows;
};

Arguments parse(int argc, char** argv) {
  Arguments a;
  CLI::App app{"Quantizes raw bytes"};
  app.add_option("--format", a.format)->required();
  app.add_option("--layout", a.layout)->required();
  app.add_option("--math", a.math, "exact | fast");
  app.add_option("--dtype", a.dtype, "Of the input: BF16, F16, F32, F8_E4M3");
  app.add_option("--batch", a.batch);
  app.add_option("--rows", a.rows)->required();
  app.add_option("--cols", a.cols)->required();
  app.add_option("--alignment", a.alignment);
  app.add_option("--encode-scale-bits", a.encode_scales, "F32 bits, or several")->delimiter(',');
  app.add_option("--base-decode-scale-bits", a.base_decode_scale, "F32 bits");
  app.add_option("--fos", a.four_over_six, "mae|mse,strict|fast,448|256")->delimiter(',');
  app.add_option("--rounding", a.rounding, "up | floor | even");
  app.add_option("--rule", a.rule, "FP8 scale rule");
  app.add_option("--eps-bits", a.eps, "F32 bits");
  app.add_option("--fp8-decode-scale-bits", a.fp8_decode_scale, "F32 bits");
  app.add_option("--row-list", a.row_list)->delimiter(',');
  app.add_option("--valid-rows", a.valid_rows)->delimiter(',');
  app.add_option("--impl", a.impl, "Pins the implementation");
  app.add_option("input", a.input)->required();
  app.add_option("output", a.output)->required();
  app.parse(argc, argv);  // Throws a std::runtime_error.
  return a;
}

float from_bits(const std::string& hex) {
  return std::bit_cast<float>(static_cast<uint32_t>(std::stoul(hex, nullptr, 16)));
}

nf::Fp8ScaleRule parse_rule(const std::string& text) {
  using enum nf::Fp8ScaleRule;
  for (const auto rule : {kReciprocal, kReciprocalPow2, kAmaxDiv, kPow2Ceil}) {
    if (nf::name(rule) == text) return rule;
  }
  throw std::runtime_error("unknown rule " + text);
}

template <typename T>
nf::TensorView view(const std::vector<T>& values, nf::DType dtype) {
  return nf::TensorView::contiguous(values.data(), dtype, {std::ssize(values)});
}

// `encode_scales` must outlive the result.
nf::QuantizeOptions quantize_options(const Arguments& a, const std::vector<float>& encode_scales) {
  nf::QuantizeOptions options;
  options.math = nf::parse_math_mode(a.math);
  options.mx_scale = nf::parse_ue8m0_rounding(a.rounding);
  options.fp8_rule = parse_rule(a.rule);
  if (!a.eps.empty()) options.fp8_eps = from_bits(a.eps);
  if (!a.fp8_decode_scale.empty()) options.fp8_decode_scale = from_bits(a.fp8_decode_scale);
  if (!a.base_decode_scale.empty()) options.base_decode_scale = from_bits(a.base_decode_scale);
  if (encode_scales.size() == 1) options.encode_scale = encode_scales[0];
  if (encode_scales.size() > 1) options.encode_scales = view(encode_scales, nf::DType::kF32);
  if (!a.four_over_six.empty()) {
    using enum nf::FourOverSixError;
    using enum nf::FourOverSixMath;
    options.four_over_six = {.enabled = true,
                             .error = a.four_over_six.at(0) == "mse" ? kMse : kMae,
                             .error_math = a.four_over_six.at(1) == "fast" ? kFast : kStrict,
                             .e4m3_max = std::stoi(a.four_over_six.at(2))};
  }
  if (!a.row_list.empty()) options.row_list = view(a.row_list, nf::DType::kI32);
  if (!a.valid_rows.empty()) options.valid_rows = view(a.valid_rows, nf::DType::kI32);
  return options;
}

void write_file(const std::string& path, const void* data, int64_t bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(static_cast<const char*>(data), bytes);
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

std::vector<char> read_input(const Arguments& a, nf::DType dtype) {
  std::ifstream file(a.input, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  if (!file || std::ssize(bytes) * 8 != a.batch * a.rows * a.cols * nf::bits(dtype)) {
    throw std::runtime_error("cannot read " + a.input + ", or it has the wrong size");
  }
  bytes.push_back(0);  // So that the pointer to an empty tensor is valid; outputs do the same.
  return bytes;
}

void run(const Arguments& a) {
  if (!a.impl.empty()) setenv("NARROWFLOAT_FORCE", ("quantize:" + a.impl).c_str(), 1);
  const nf::DType dtype = nf::parse_dtype(a.dtype).value();
  const std::vector<char> input = read_input(a, dtype);
  std::vector<float> encode_scales;
  for (const auto& hex : a.encode_scales) encode_scales.push_back(from_bits(hex));
  const auto layout =
      nf::quantized_layout(nf::parse_format(a.format), a.rows, a.cols,
                           {nf::parse_scale_layout(a.layout), a.batch, a.alignment});
  int64_t globals = layout.global_scales;
  if (globals == 1 && encode_scales.size() > 1) globals = std::ssize(encode_scales);
  if (globals == 1 && encode_scales.empty() && !a.valid_rows.empty()) globals = a.batch;
  const float poison = std::bit_cast<float>(0xCCCCCCCCU);
  std::vector<uint8_t> values(static_cast<size_t>(layout.values_bytes) + 1, 0xCC);
  std::vector<float> scales(static_cast<size_t>(layout.scales_bytes / 4) + 1, poison);
  std::vector<float> global(static_cast<size_t>(globals) + 1, poison);
  nf::QuantizedView output = layout.bind(values.data(), scales.data(), global.data());
  if (globals != layout.global_scales) {
    output.global_scale = nf::TensorView::contiguous(global.data(), nf::DType::kF32, {globals});
  }
  nf::quantize(nf::TensorView::contiguous(input.data(), dtype, {a.batch, a.rows, a.cols}), output,
               quantize_options(a, encode_scales));
  write_file(a.output + ".values", values.data(), layout.values_bytes);
  write_file(a.output + ".scales", scales.data(), layout.scales_bytes);
  write_file(a.output + ".global", global.data(), globals * 4);
}

}  // namespace

int main(int argc, char** argv) try {
  run(parse(argc, argv));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "quantize_raw: %s\n", error.what());
  return 1;
}

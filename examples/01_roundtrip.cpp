// Quantizes a small matrix to every format, reads it back, and prints what it cost: bits per
// element (scales included) and the signal-to-noise ratio.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "narrowfloat/narrowfloat.h"

namespace nf = narrowfloat;

namespace {

constexpr int64_t kRows = 256;
constexpr int64_t kCols = 512;

// Values like those of a trained weight matrix: a bell curve.
std::vector<float> make_matrix() {
  std::mt19937 generator(1);
  std::normal_distribution<float> bell(0.0F, 0.02F);
  std::vector<float> matrix(kRows * kCols);
  for (float& value : matrix) value = bell(generator);
  return matrix;
}

double sqnr_db(const std::vector<float>& original, const std::vector<float>& restored) {
  double signal = 0;
  double noise = 0;
  for (size_t i = 0; i < original.size(); ++i) {
    const double error = double{original[i]} - double{restored[i]};
    signal += double{original[i]} * double{original[i]};
    noise += error * error;
  }
  return 10 * std::log10(signal / noise);
}

void round_trip(const nf::FormatInfo& format, const std::vector<float>& original) {
  // 1. How large are the buffers? The caller owns all memory.
  const nf::QuantizedLayout layout = nf::quantized_layout(format.id, kRows, kCols);
  std::vector<uint8_t> values(static_cast<size_t>(layout.values_bytes));
  std::vector<float> scales(static_cast<size_t>((layout.scales_bytes + 3) / 4));
  std::vector<float> global_scale(static_cast<size_t>(layout.global_scales));
  const nf::QuantizedView quantized =
      layout.bind(values.data(), scales.data(), global_scale.data());

  // 2. Quantize and 3. dequantize: views in, views out.
  std::vector<float> restored(original.size());
  const auto input = nf::TensorView::contiguous(original.data(), nf::DType::kF32, {kRows, kCols});
  const auto output = nf::TensorView::contiguous(restored.data(), nf::DType::kF32, {kRows, kCols});
  nf::quantize(input, quantized);
  nf::dequantize(quantized, output);

  const int64_t total_bytes =
      layout.values_bytes + layout.scales_bytes + int64_t{sizeof(float)} * layout.global_scales;
  const double bits = 8.0 * static_cast<double>(total_bytes) / (kRows * kCols);
  std::printf("%-16s %6.3f bits  %5.1f dB   %s\n", std::string(format.name).c_str(), bits,
              sqnr_db(original, restored), std::string(format.description).c_str());
}

}  // namespace

int main() {
  try {
    const std::vector<float> matrix = make_matrix();
    std::printf("narrowfloat %s, a %lld x %lld matrix in every format\n",
                std::string(nf::version()).c_str(), static_cast<long long>(kRows),
                static_cast<long long>(kCols));
    for (const nf::FormatInfo& format : nf::all_formats()) round_trip(format, matrix);
  } catch (const nf::Error& error) {  // Every error of the library is one of these.
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

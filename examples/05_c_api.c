// Quantizes a matrix to each 4-bit and 8-bit format through the C API, dequantizes it, and says how
// far apart the numbers are:
//     cc -std=c99 05_c_api.c $(pkg-config --cflags --libs narrowfloat) -lm
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "narrowfloat/narrowfloat_c.h"

enum { kRows = 64, kCols = 256 };

static int fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, nf_last_error());
  return 1;
}

static int round_trip(const char* format, float* input, float* output) {
  // Every member that is not set has its default. The library says how large the buffers are.
  struct NfQuantized quantized = {sizeof(quantized)};
  quantized.device = -1;
  quantized.format = format;
  quantized.rows = kRows;
  quantized.cols = kCols;
  if (nf_quantized_sizes(&quantized) != kNfOk) return fail(format);
  quantized.values = malloc((size_t)quantized.values_bytes);
  quantized.scales = malloc((size_t)quantized.scales_bytes);
  quantized.global_scale = malloc(sizeof(float) * (size_t)quantized.global_scales);

  const struct NfTensor from = {input, "F32", -1, 2, {kRows, kCols}, {0}};
  const struct NfTensor to = {output, "F32", -1, 2, {kRows, kCols}, {0}};
  int32_t status = nf_quantize(&from, &quantized, NULL, NULL);
  if (status == kNfOk) status = nf_dequantize(&quantized, &to, NULL);
  free(quantized.values);
  free(quantized.scales);
  free(quantized.global_scale);
  if (status != kNfOk) return fail(format);

  double error = 0;
  double norm = 0;
  for (int i = 0; i < kRows * kCols; ++i) {
    error += pow((double)output[i] - (double)input[i], 2);
    norm += pow((double)input[i], 2);
  }
  printf("%-12s %-14s %6lld bytes, relative error %.4f\n", format, quantized.layout,
         (long long)(quantized.values_bytes + quantized.scales_bytes), sqrt(error / norm));
  return 0;
}

int main(void) {
  static float input[kRows * kCols];
  static float output[kRows * kCols];
  for (int i = 0; i < kRows * kCols; ++i) input[i] = sinf((float)(i * i % 977));
  const char* formats[] = {"nvfp4", "mxfp4", "mxfp8", "fp8_128x128"};
  for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); ++i) {
    if (round_trip(formats[i], input, output) != 0) return 1;
  }
  return 0;
}

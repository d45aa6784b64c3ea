// Launchers of sm90_rows' kernels by what they do: those of quantize_rows.cuh, of
// quantize_token_dense.cuh and of quantize_stream.cuh, and the kernel before them.
#pragma once

#include "ops/quantize/sm90/quantize_params.h"

namespace narrowfloat {

// The kernels of quantize_rows.cuh: every source, any number of columns.
void launch_quantize_rows_fp4(const QuantizeProblem& problem, const QuantizeParams& params,
                              Stream stream);
void launch_quantize_rows_fp8(const QuantizeProblem& problem, const QuantizeParams& params,
                              Stream stream);
void launch_quantize_rows_four_over_six(const QuantizeProblem& problem,
                                        const QuantizeParams& params, Stream stream);
// NVFP4 per token from plain 16-bit tensors whose rows fit the registers of a CTA and all count.
bool is_token_dense(const QuantizeProblem& problem);
void launch_quantize_token_dense(const QuantizeProblem& problem, const QuantizeParams& params,
                                 Stream stream);
// bf16 norms into formats with blocks inside a row, and NVFP4 per token from SiLU and smoothing, of
// dense rows of up to kMaxStreamCols columns (quantize_stream.cuh).
inline constexpr int64_t kMaxStreamCols = 16384;
bool is_stream(const QuantizeProblem& problem, const QuantizeParams& params);
void launch_quantize_stream(const QuantizeProblem& problem, const QuantizeParams& params,
                            Stream stream);
void launch_quantize_stream_norm_fp4(const QuantizeProblem& problem, const QuantizeParams& params,
                                     Stream stream);
void launch_quantize_stream_norm_fp8(const QuantizeProblem& problem, const QuantizeParams& params,
                                     Stream stream);
void launch_quantize_stream_token(const QuantizeProblem& problem, const QuantizeParams& params,
                                  Stream stream);

// Columns of FP8's two-dimensional blocks.
inline constexpr int kTileCols = 128;

// What a norm's rows leave for a second kernel.
struct NormRowsResult {
  // Of the tensor's or the batches' maxima, cleared before; null: none are wanted.
  float* amax_slots = nullptr;
  int64_t slots_per_batch = 0;  // 0: one slot for all.
  // 1 / rms into the first four bytes of each 128 columns of the values.
  bool stores_reciprocal_rms = false;
};

// Everything of a norm but its quantization: adds the residual, stores the norm output.
void launch_prepare_norm_rows(const QuantizeProblem& problem, const QuantizeParams& params,
                              const NormRowsResult& result, Stream stream);
// What is left for the second kernel: the norm of the residual, or of the input.
QuantizeParams after_prepare_norm_rows(const QuantizeParams& params);

// Conditions of the kernels.
Support norm_extents(const QuantizeProblem& problem);

}  // namespace narrowfloat

// Launchers of sm90_rows' kernels: those of quantize_rows.cuh, quantize_token_dense.cuh and
// quantize_stream.cuh, and the kernel before them.
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
// True for NVFP4 per token from plain 16-bit tensors whose rows fit the registers of a CTA and are
// all valid.
bool is_token_dense(const QuantizeProblem& problem);
void launch_quantize_token_dense(const QuantizeProblem& problem, const QuantizeParams& params,
                                 Stream stream);
// The kernels of quantize_stream.cuh: bf16 norms into formats with blocks inside a row, and NVFP4
// per token from SiLU and smoothing, of dense rows of up to kMaxStreamCols columns.
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

// The results that a norm's first kernel leaves for the second.
struct NormRowsResult {
  // Slots for the tensor's or the batches' maxima, cleared before; null: no maxima are wanted.
  float* amax_slots = nullptr;
  int64_t slots_per_batch = 0;  // 0: one slot for all batches.
  // Stores 1 / rms into the first four bytes of each 128 columns of the values.
  bool stores_reciprocal_rms = false;
};

// Runs everything of a norm but its quantization: adds the residual, stores the norm output.
void launch_prepare_norm_rows(const QuantizeProblem& problem, const QuantizeParams& params,
                              const NormRowsResult& result, Stream stream);
// The parameters of the second kernel: the norm of the residual, or of the input.
QuantizeParams after_prepare_norm_rows(const QuantizeParams& params);

// The conditions of the kernels.
Support norm_extents(const QuantizeProblem& problem);

}  // namespace narrowfloat

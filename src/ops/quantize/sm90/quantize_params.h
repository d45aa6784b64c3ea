// The arguments of the CUDA quantizers: a QuantizeProblem and its QuantizeArgs as one plain struct
// of numbers and device pointers, and the limit of their indices.
#pragma once

#include <cstdint>

#include "base/fast_division.h"
#include "formats/four_over_six.h"
#include "ops/quantize/quantize_problem.h"
#include "tensor/layouts/scale_extents.h"

namespace narrowfloat {

// One scale tensor per batch, contiguous in memory.
struct ScaleTensors {
  uint8_t* data = nullptr;  // Null: there is none.
  ScaleLayoutId layout = ScaleLayoutId::kLinear;
  ScaleExtents extents;      // Logical rows and blocks of one tensor.
  int64_t tensor_bytes = 0;  // Bytes of one tensor, padding included.
};

// The rows that a problem quantizes: the source and the type of its input.
enum class RowInput : int32_t {
  kBf16 = 0,
  kF16 = 1,
  kF32 = 2,
  kE4m3 = 3,
  kSiluBf16 = 4,
  kSiluF16 = 5,
  kSmooth = 6,  // The input is bf16.
  kNormBf16 = 7,
  kNormF16 = 8,
};
RowInput row_input(const QuantizeProblem& problem);

struct QuantizeParams {
  const uint8_t* input;  // [batch, rows, cols], or 2 * cols for SiLU; strides in bytes.
  int64_t input_batch_stride;
  int64_t input_row_stride;
  const uint8_t* vector;  // [cols]: smoothing factors or norm weight.
  uint8_t* residual;      // [batch * rows, cols]
  int64_t residual_row_stride;
  uint8_t* norm_output;  // [batch * rows, cols], dense; null: there is none.
  float norm_eps;

  uint8_t* values;  // [batch * rows, value_row_bytes]
  int64_t value_row_bytes;
  ScaleTensors scales;
  ScaleTensors extra_scales;
  float* global_scale;

  EncodeScaleSource encode_source;
  EncodeScaleAxis encode_axis;
  ScalePair host_pair;         // The pair of a scale that the host knows.
  const float* encode_scales;  // Device values, indexed by encode_axis.
  // kAmax: the maxima as bit patterns. An earlier kernel finds them and stores them where a later
  // one writes the decode scales (FP8 per tensor: the scales).
  float e4m3_max;
  float base_decode_scale;
  const float* device_base;  // Null: base_decode_scale counts.
  bool has_fp8_decode_scale;
  float fp8_decode_scale;

  BlockRules rules;
  FourOverSix four_over_six;

  int64_t batch;
  int64_t rows;
  int64_t cols;
  int64_t value_cols;
  const int32_t* row_list;  // Null: all rows.
  int64_t num_listed_rows;
  const int32_t* valid_rows;   // [batch]; null: all rows are valid.
  const int64_t* row_offsets;  // [groups + 1]; null: no groups.
  int64_t groups;
  FastDivisor rows_per_batch;

  RowInput row_input;
  bool is_fast;  // The arithmetic of the source is MathMode::kFast.
};

QuantizeParams make_quantize_params(const QuantizeProblem& problem, const QuantizeArgs& args);

// Supports the extents that the kernels' indices hold.
Support sm90_extents(const QuantizeProblem& problem);

}  // namespace narrowfloat

// See encode_scales.h.
#include "ops/quantize/encode_scales.h"

#include <algorithm>

#include "formats/global_scale.h"

namespace narrowfloat {

int64_t valid_rows(const QuantizeProblem& problem, const QuantizeArgs& args, int64_t batch) {
  if (!problem.has_valid_rows) return problem.rows;
  const int64_t count = args.valid_rows[static_cast<size_t>(batch)];
  return std::clamp<int64_t>(count, 0, problem.rows);
}

EncodeScales::EncodeScales(const QuantizeProblem& problem, const QuantizeArgs& args,
                           const AmaxOfBatches& amax)
    : problem_(problem), args_(args) {
  if (problem.encode_source != EncodeScaleSource::kAmax) return;
  const auto e4m3_max = static_cast<float>(problem.four_over_six.e4m3_max);
  const bool is_per_batch = problem.encode_axis == EncodeScaleAxis::kBatch;
  const int64_t scales = is_per_batch ? problem.batch : 1;
  const int64_t batches_each = is_per_batch ? 1 : problem.batch;
  for (int64_t i = 0; i < scales; ++i) {
    computed_.push_back(encode_scale_of_amax(amax(i, batches_each), e4m3_max));
  }
}

float EncodeScales::encode(int64_t batch, int64_t row) const {
  int64_t index = 0;
  if (problem_.encode_axis == EncodeScaleAxis::kRow) index = row;
  if (problem_.encode_axis == EncodeScaleAxis::kBatch) index = batch;
  switch (problem_.encode_source) {
    case EncodeScaleSource::kTensor:
      return args_.encode_scales[index];
    case EncodeScaleSource::kAmax:
      return computed_[static_cast<size_t>(index)];
    case EncodeScaleSource::kHost:
      return args_.encode_scale;
    case EncodeScaleSource::kNone:
      break;
  }
  return 1.0F;
}

void EncodeScales::store_decode_scales() const {
  if (args_.global_scale == nullptr || format_info(problem_.format).has_row_scale) return;
  int64_t count = 1;
  if (problem_.encode_axis == EncodeScaleAxis::kRow) count = problem_.rows;
  if (problem_.encode_axis == EncodeScaleAxis::kBatch) count = problem_.batch;
  for (int64_t i = 0; i < count; ++i) {
    args_.global_scale[i] = canonical_nan(div_rn(1.0F, encode(i, i)));
  }
}

}  // namespace narrowfloat

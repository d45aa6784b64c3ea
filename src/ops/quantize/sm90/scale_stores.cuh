// Stores block scales and the zeros of their padding, and computes the scale of a row or tensor
// that blocks are scaled with.
#pragma once

#include "device/device_math.cuh"
#include "formats/global_scale.h"
#include "formats/registry.h"
#include "ops/quantize/sm90/quantize_params.h"
#include "tensor/layouts/registry.h"

namespace narrowfloat {

// The number of valid rows of a batch.
__device__ inline int64_t valid_rows(const QuantizeParams& params, uint32_t batch) {
  if (params.valid_rows == nullptr) return params.rows;
  const int64_t count = params.valid_rows[batch];
  return count < 0 ? 0 : count > params.rows ? params.rows : count;
}

// The row in the packed scales of a row of FP8 1x128 with groups (spec 8.6). Offsets that are not
// ascending give some row of the scale tensor; -1 stands for a row beyond it.
__device__ inline int64_t packed_row(const QuantizeParams& params, int64_t row) {
  if (params.row_offsets == nullptr) return row;
  // The last group that starts at or before the row.
  int64_t low = 0;
  int64_t high = params.groups;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (params.row_offsets[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t start = params.row_offsets[low];
  const int64_t place = (start + 31 * low) / 32 * 32 + (row - start);
  return place < 0 || place >= params.scales.extents.rows ? -1 : place;
}

// Stores the scale of (row, block), and the zeros that pad a row's last tile of blocks.
template <typename Stored>
__device__ inline void store_scale(const ScaleTensors& tensors, uint32_t batch, int64_t row,
                                   uint32_t block, Stored scale) {
  if (tensors.data == nullptr || row < 0) return;
  auto* base = reinterpret_cast<Stored*>(tensors.data + batch * tensors.tensor_bytes);
  switch (tensors.layout) {
    case ScaleLayoutId::kLinear:
      base[LinearLayout::offset(row, block, tensors.extents)] = scale;
      return;
    case ScaleLayoutId::kMnMajor:
      base[MnMajorLayout::offset(row, block, tensors.extents)] = scale;
      return;
    case ScaleLayoutId::kSwizzled128x4:
    case ScaleLayoutId::kSwizzled8x4:
      break;
  }
  const bool is_128x4 = tensors.layout == ScaleLayoutId::kSwizzled128x4;
  Stored* place = base + (is_128x4 ? Swizzled128x4Layout::offset(row, block, tensors.extents)
                                   : Swizzled8x4Layout::offset(row, block, tensors.extents));
  *place = scale;
  if (block + 1 == tensors.extents.blocks) {
    // Four blocks of a row are adjacent in both layouts.
    for (uint32_t pad = 1; (block + pad) % 4 != 0; ++pad) place[pad] = Stored{0};
  }
}

// Pad rows of swizzled and mn_major scales, in pieces of four bytes: four blocks of a swizzled row,
// one scale of an mn_major row.
struct ScalePadding {
  uint32_t rows = 0;    // Pad rows of one tensor.
  uint32_t pieces = 0;  // Pieces per pad row.

  __host__ __device__ uint32_t per_tensor() const { return rows * pieces; }
};

inline ScalePadding scale_padding(const ScaleTensors& tensors) {
  ScalePadding padding;
  if (tensors.data == nullptr) return padding;
  visit_layout(tensors.layout, [&]<typename Layout>() {
    const ScaleExtents padded = Layout::padded(tensors.extents);
    padding.rows = static_cast<uint32_t>(padded.rows - tensors.extents.rows);
    const bool is_mn_major = tensors.layout == ScaleLayoutId::kMnMajor;
    padding.pieces = static_cast<uint32_t>(is_mn_major ? padded.blocks : padded.blocks / 4);
  });
  return padding;
}

// Zeroes piece `index` of a scale tensor's pad rows. Adjacent threads zero adjacent memory in
// swizzled_128x4: the pad rows of one tile are numbered consecutively.
__device__ inline void clear_padding(const ScaleTensors& tensors, const ScalePadding& padding,
                                     uint32_t batch, uint32_t index) {
  const uint32_t piece = index / padding.rows;
  const int64_t row = tensors.extents.rows + index % padding.rows;
  uint8_t* base = tensors.data + batch * tensors.tensor_bytes;
  int64_t offset = 0;
  switch (tensors.layout) {
    case ScaleLayoutId::kLinear:
      return;
    case ScaleLayoutId::kMnMajor:
      offset = 4 * MnMajorLayout::offset(row, piece, tensors.extents);
      break;
    case ScaleLayoutId::kSwizzled128x4:
      offset = Swizzled128x4Layout::offset(row, 4 * piece, tensors.extents);
      break;
    case ScaleLayoutId::kSwizzled8x4:
      offset = Swizzled8x4Layout::offset(row, 4 * piece, tensors.extents);
      break;
  }
  *reinterpret_cast<uint32_t*>(base + offset) = 0;
}

// The slot that holds the maximum of a batch's (or the whole tensor's) elements until its scale is
// computed.
template <BlockFormat Format>
__device__ inline float* amax_slot(const QuantizeParams& params, uint32_t batch) {
  if constexpr (Format::kId == FormatId::kFp8Tensor) {
    return reinterpret_cast<float*>(params.scales.data) + batch;
  }
  return params.global_scale + (params.encode_axis == EncodeScaleAxis::kBatch ? batch : 0);
}

// The encode scale of a row, from any source.
template <BlockFormat Format>
__device__ inline float encode_scale(const QuantizeParams& params, uint32_t batch, int64_t row) {
  switch (params.encode_source) {
    case EncodeScaleSource::kTensor: {
      int64_t index = 0;
      if (params.encode_axis == EncodeScaleAxis::kRow) index = row;
      if (params.encode_axis == EncodeScaleAxis::kBatch) index = batch;
      return params.encode_scales[index];
    }
    case EncodeScaleSource::kAmax:
      return encode_scale_of_amax(*amax_slot<Format>(params, batch), params.e4m3_max);
    case EncodeScaleSource::kHost:
      return params.host_pair.encode;
    case EncodeScaleSource::kNone:
      break;
  }
  return 1.0F;
}

// The encode and decode factor of a row of a format without row scales.
template <BlockFormat Format, class Math>
__device__ inline ScalePair row_pair(const QuantizeParams& params, uint32_t batch, int64_t row) {
  if (params.encode_source == EncodeScaleSource::kHost) return params.host_pair;
  const float encode = encode_scale<Format>(params, batch, row);
  if constexpr (Format::kHasGlobalScale) return Format::template scale_pair<Math>(encode);
  return {encode, 1.0F};
}

// FP8 per tensor: the multiplier and stored scale of a batch.
template <class Math>
__device__ inline BlockScale<float> tensor_scale(const QuantizeParams& params, uint32_t batch) {
  if (params.has_fp8_decode_scale) return Fp8Tensor::given_scale(params.fp8_decode_scale);
  const float amax = *amax_slot<Fp8Tensor>(params, batch);
  return Fp8Tensor::block_scale<Math>(amax, ScalePair{}, params.rules);
}

}  // namespace narrowfloat

// Launches the kernel of quantize_stream.cuh: its parameters, and as many CTAs as the GPU holds at
// once.
#pragma once

#include <algorithm>

#include "ops/quantize/sm90/quantize_rows.h"
#include "ops/quantize/sm90/quantize_stream.cuh"
#include "ops/quantize/sm90/visit_sources.cuh"
#include "runtime/cuda/cuda_devices.h"
#include "runtime/cuda/shared_memory_opt_in.h"

namespace narrowfloat {

// The formulas of the layouts (tensor/layouts), each split into a row part and a block part.
inline ScalePlaces scale_places(const ScaleTensors& tensors) {
  const auto blocks = static_cast<uint32_t>(tensors.extents.blocks);
  const auto tiles = static_cast<uint32_t>(ceil_div(tensors.extents.blocks, 4));
  switch (tensors.layout) {
    case ScaleLayoutId::kLinear:
      return {.layout = tensors.layout, .row_stride = blocks, .block_stride = 1};
    case ScaleLayoutId::kMnMajor: {
      const auto rows = static_cast<uint32_t>(MnMajorLayout::padded(tensors.extents).rows);
      return {.layout = tensors.layout, .row_stride = 1, .block_stride = rows};
    }
    case ScaleLayoutId::kSwizzled8x4:
      return {.layout = tensors.layout,
              .row_shift = 3,
              .row_stride = tiles * 32,
              .low_rows = 7,
              .low_stride = 4,
              .block_shift = 2,
              .block_stride = 32,
              .block_mask = 3};
    case ScaleLayoutId::kSwizzled128x4:
      break;
  }
  return {.layout = tensors.layout,
          .row_shift = 7,
          .row_stride = tiles * 512,
          .low_rows = 31,
          .low_stride = 16,
          .high_rows = 3,
          .block_shift = 2,
          .block_stride = 512,
          .block_mask = 3};
}

inline QuantizeStreamParams make_stream_params(const QuantizeProblem& problem,
                                               const QuantizeParams& params) {
  QuantizeStreamParams stream{};
  stream.input = params.input;
  stream.input_row_stride = params.input_row_stride;
  stream.vector = params.vector;
  stream.runs_per_row = static_cast<uint32_t>(problem.cols / kRowRun);
  stream.num_rows = static_cast<uint32_t>(problem.rows);
  stream.values = params.values;
  stream.scales = params.scales.data;
  stream.places = scale_places(params.scales);
  stream.blocks = static_cast<uint32_t>(params.scales.extents.blocks);
  stream.rules = params.rules;
  stream.cols = static_cast<float>(problem.cols);
  stream.eps = params.norm_eps;
  if (params.encode_source == EncodeScaleSource::kTensor) {
    stream.device_scale = params.encode_scales;
  }
  stream.is_amax = params.encode_source == EncodeScaleSource::kAmax;
  if (stream.is_amax) stream.device_scale = params.global_scale;
  stream.host_encode = params.host_pair.encode;
  stream.e4m3_max = params.e4m3_max;
  stream.global_scale = params.global_scale;
  stream.base = {params.base_decode_scale, 1.0F / params.base_decode_scale};
  stream.device_base = params.device_base;
  stream.scale_tensors = params.scales;
  stream.padding = scale_padding(params.scales);
  return stream;
}

// The number of CTAs that an SM of compute capability 9.0 holds.
inline int64_t stream_ctas_per_sm(const CudaDevice& device, int64_t threads, int64_t registers,
                                  int64_t shared_bytes) {
  constexpr int64_t kSystemBytes = 1024;  // Shared memory that the system takes per CTA.
  const int64_t memory = device.max_shared_bytes_per_block + kSystemBytes;
  const int64_t by_memory = memory / (shared_bytes + kSystemBytes);
  const int64_t by_registers = 65536 / (round_up(registers, 8) * threads);
  const int64_t most = std::min<int64_t>({by_memory, by_registers, 2048 / threads, 32});
  return std::max<int64_t>(1, most);
}

struct StreamTuning {
  static constexpr QuantizeStreamConfig kConfig{.max_threads = 1024, .registers = 64};
  static_assert(is_valid(kConfig));
};
static_assert(kMaxStreamCols == StreamTuning::kConfig.max_threads * kRowRun);

template <class Source>
constexpr int64_t stream_shared_bytes(int64_t threads) {
  return StreamShared::kBytes + threads / kWarpSize * RowRing<Source::kInputs>::kBytes;
}

template <BlockFormat Format, class Math, class Source>
void launch_stream(const QuantizeProblem& problem, const QuantizeParams& params, Stream stream) {
  using Tuning = StreamTuning;
  constexpr auto kKernel = quantize_stream_kernel<Format, Math, Source, Tuning>;
  const CudaDevice& device = cuda_device(problem.device.index);
  const int64_t threads = round_up(problem.cols / kRowRun, kWarpSize);
  const int64_t shared_bytes = stream_shared_bytes<Source>(threads);
  // The kernel opts in once, for the widest row, whatever this call's width is.
  constexpr int64_t kMostBytes = stream_shared_bytes<Source>(Tuning::kConfig.max_threads);
  static SharedMemoryOptIn opt_in;
  opt_in.allow(reinterpret_cast<const void*>(kKernel), kMostBytes, problem.device.index);
  const QuantizeStreamParams stream_params = make_stream_params(problem, params);
  // A small number of rows may have much padding.
  const int64_t wanted =
      std::max(problem.rows, ceil_div(stream_params.padding.per_tensor(), threads));
  const int64_t most =
      device.num_sms * stream_ctas_per_sm(device, threads, Tuning::kConfig.registers, shared_bytes);
  launch(kKernel,
         {dim3(static_cast<unsigned>(std::min(wanted, most))), dim3(static_cast<unsigned>(threads)),
          static_cast<size_t>(shared_bytes)},
         stream, stream_params);
}

}  // namespace narrowfloat

// Runs the calls of a GemmCase on a GPU, with every buffer there copied, poisoned or guarded.
#pragma once

#include <memory>
#include <vector>

#include "ops/grouped_gemm/grouped_gemm_problem.h"
#include "support/device_buffer.h"
#include "support/gemm_case.h"

namespace narrowfloat::testing {

// Sampled cases have this many products at most, since the model on the CPU is slow.
inline constexpr int64_t kMaxProducts = 3'000'000;

// Errors of sums: of one by the magnitudes of its terms, and of all by their norm (moe spec 12.3).
// FP8 tensor cores keep 13 fraction bits.
struct GemmTolerance {
  double of_terms = 1e-5;
  double of_norm = 5e-5;
};
GemmTolerance gemm_tolerance(const GemmCaseSpec& spec);

// A GemmCase's weights prepared on the GPU and its tensors there.
class GemmOnDevice {
 public:
  explicit GemmOnDevice(const GemmCase& gemm, DType output = DType::kF32,
                        ScaleLayoutId layout = ScaleLayoutId::kLinear);

  // Arguments on the GPU; tests may change them before a run.
  GroupedGemmArgs args;
  LayerGemm layer;
  // The output's bytes, 0xFF where nothing was written. Fails the test if guard bytes fell.
  [[nodiscard]] std::vector<uint8_t> run(bool programmatic_launch = false) const;
  // The same as a graph, replayed a few times.
  [[nodiscard]] std::vector<uint8_t> replay() const;
  // A copy on the GPU, of a view of host memory; its buffer lives as long as this object.
  TensorView copy(const TensorView& host);
  [[nodiscard]] const GroupedWeights& weights() const { return weights_; }

 private:
  void call(Stream stream) const;
  [[nodiscard]] std::vector<uint8_t> take_output() const;
  void* copy_bytes(const void* host, int64_t size);

  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  CudaStream stream_;
  GroupedWeights weights_;
  DeviceBuffer output_;
  DeviceBuffer workspace_;
};

// Every result is within the tolerance of the exact sum, and so are all of them together.
void expect_near(const GemmCase& gemm, DType dtype, const std::vector<uint8_t>& output);
// Rows of padding and of tiles that are not in use keep their poison.
void expect_padding_untouched(const GemmCase& gemm, DType dtype,
                              const std::vector<uint8_t>& output);
// Makes the call's tiles smaller: the same rows, some tiles without any.
void divide_tiles(const GemmCase& gemm, int32_t token_tile, GemmOnDevice& device);

}  // namespace narrowfloat::testing

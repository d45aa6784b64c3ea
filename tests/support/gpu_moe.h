// Layers of moe_case.h on a GPU: the case's tensors are copied there, outputs come back as the
// bytes that the CPU's run has, so that the two compare.
#pragma once

#include <cstdint>
#include <vector>

#include "support/device_buffer.h"
#include "support/moe_case.h"

namespace narrowfloat::testing {

// Copies of host tensors in guarded device memory. Absent views stay absent.
class DeviceTensors {
 public:
  explicit DeviceTensors(Device device = gpu()) : device_(device) {}
  [[nodiscard]] TensorView copy(const TensorView& host);
  [[nodiscard]] ScaleView copy(const ScaleView& host);
  [[nodiscard]] PerExpert copy(const PerExpert& host);
  // Overwrites all copies with `byte`.
  void fill(uint8_t byte) const;

 private:
  [[nodiscard]] uint8_t* memory(const void* host, int64_t bytes);

  Device device_;
  std::vector<DeviceBuffer> buffers_;
};

// The weights and parameters are overwritten afterwards: a layer has copies of its own.
MoeLayer prepare_on_gpu(const MoeWeights& weights, const MoeConfig& config, Device device = gpu());
inline MoeLayer prepare_on_gpu(MoeCase& layer_case) {
  return prepare_on_gpu(layer_case.weights(), layer_case.config());
}

// Inputs, outputs and workspace of runs of one layer with one number of tokens.
class GpuMoeRun {
 public:
  GpuMoeRun(const MoeLayer& layer, const MoeInputs& inputs, const Routing& routing,
            Device device = gpu());
  GpuMoeRun(const MoeLayer& layer, MoeCase& layer_case, Device device = gpu())
      : GpuMoeRun(layer, layer_case.inputs(), layer_case.routing(), device) {}

  // Queues a run; may be captured.
  void queue(Stream stream) const;
  // The same without `out`.
  void queue_slots(Stream stream) const;
  // The same as queue(), with `cols` columns of `out`, dense.
  void queue_first_cols(int64_t cols, Stream stream) const;
  // The same as queue(), with the first `tokens` tokens of all inputs and outputs.
  void queue_first_tokens(int64_t tokens, Stream stream) const;
  // The same as queue(), with another size of the workspace.
  void queue_in_workspace(int64_t bytes, Stream stream) const;
  // combine() of the slots' rows into `out`.
  void queue_combine(Stream stream) const;
  // Other values of the same shapes.
  void send(const MoeInputs& inputs, const Routing& routing) const;
  // Another workspace of the same size, `offset` bytes into its buffer.
  void move_workspace(int64_t offset);
  // Fills outputs and workspace.
  void poison(uint8_t byte) const;
  // After the work has ended. Expects that nothing around the buffers was written.
  [[nodiscard]] MoeResult take() const;
  [[nodiscard]] DeviceErrors errors() const;
  [[nodiscard]] std::vector<uint8_t> workspace() const { return workspace_.copy(); }
  // Tokens [begin, begin + count) of `out` alone.
  [[nodiscard]] std::vector<float> output_of(int64_t begin, int64_t count) const;

 private:
  MoeLayer layer_;
  Device device_;
  int64_t tokens_;
  DeviceBuffer x_, scales_, row_scale_, logits_, router_bias_, packed_, ids_in_, weights_in_;
  DeviceBuffer out_, slot_out_, weights_, ids_, slot_to_row_, errors_, workspace_;
  MoeInputs inputs_;
  Routing routing_;
  MoeOutputs outputs_;
  TensorView workspace_view_;
};

struct GpuMoeStyle {
  uint8_t poison = 0xFF;
  bool programmatic_launch = false;
};
MoeResult run_on_gpu(const MoeLayer& layer, MoeCase& layer_case, const GpuMoeStyle& style = {});

// Moe spec 12: maps and ids equal, outputs within the end-to-end tolerance of the fp64 reference on
// the CPU. One code of an intermediate row that flips by q is worth q / sqrt(I) of the row's norm:
// below I = 512 the bounds, which are for I = 2048, grow like that. moe_stages.h has them as they
// are.
void expect_close(const MoeCase& layer_case, const MoeConfig& config, const MoeResult& reference,
                  const MoeResult& actual);

// `result` is a run of the first tokens of `oracle`, or of all of them over and over
// (RepeatedTokens). Those are close to the oracle, the others equal to them to the bit, slots lie
// in the rows of moe spec 5.1, and `out` is what 6.6 makes of them.
void expect_batch_close(const MoeCase& layer_case, const MoeLayer& layer, const MoeResult& oracle,
                        const MoeResult& result);

}  // namespace narrowfloat::testing

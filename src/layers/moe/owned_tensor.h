// Copies of the small tensors of a layer, on the layer's device: they live as long as the layer.
// Making them may synchronize with the device; reading the views does not.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "narrowfloat/moe_types.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

class OwnedTensor {
 public:
  OwnedTensor() = default;
  // source: dense, or absent. The copy is made in the stream's order.
  OwnedTensor(const TensorView& source, Stream stream);
  [[nodiscard]] TensorView view() const { return view_; }

 private:
  std::shared_ptr<uint8_t> memory_;
  TensorView view_;  // View of the copy.
};

class OwnedPerExpert {
 public:
  OwnedPerExpert() = default;
  OwnedPerExpert(const PerExpert& source, Stream stream)
      : one_(source.value), each_(source.values, stream) {}
  [[nodiscard]] PerExpert view() const {
    const TensorView each = each_.view();
    return each.is_absent() ? PerExpert(one_) : PerExpert(each);
  }

 private:
  float one_ = 1.0F;
  OwnedTensor each_;
};

// The values of a dense F32 tensor, wherever it lies, after what was queued on the stream.
std::vector<float> floats_on_host(const TensorView& source, Stream stream);
// Returns when the copies of owned tensors are complete.
void wait_for_copies(Device device, Stream stream);

// Refuses devices on which a layer cannot run.
void require_usable_device(Device device);

}  // namespace narrowfloat

// Tensors of KV-cache calls in guarded memory, for tests on any device.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "narrowfloat/kv_cache.h"
#include "support/device_copies.h"
#include "support/fills.h"

namespace narrowfloat::testing {

struct KvCaseShape {
  int64_t pages = 0;
  int64_t page_size = 1;
  int64_t heads = 1;
  int64_t k_dim = 16;  // Head dimensions.
  int64_t v_dim = 16;
  KvLayout layout = KvLayout::kNhd;
  bool is_stacked = false;  // K and V are halves of each page of one tensor; k_dim == v_dim.
};
KvCaseShape sample_kv_shape(Random& random);

// All tensors of one call. Buffers do not move once made.
class KvTensors {
 public:
  KvTensors(uint64_t seed, const BufferStyle& style) : random_(seed), style_(style) {}

  // Values of `cache` and scales are poison, or random where the call reads them.
  PagedKvCache cache(const KvCaseShape& shape, bool is_random);
  // Numbers with `gap` elements after each row.
  TensorView numbers(DType dtype, const std::vector<int64_t>& shape, Fill fill, int64_t gap = 0);
  // Poison, to be written.
  TensorView output(DType dtype, const std::vector<int64_t>& shape, int64_t gap = 0);
  TensorView random_bytes(const std::vector<int64_t>& shape);
  TensorView indices(DType dtype, const std::vector<int64_t>& values,
                     const std::vector<int64_t>& shape);
  // A factor of either kind; on a device also what the host refuses.
  KvScale scale();

  [[nodiscard]] Buffers buffers() const;
  // The bytes of all buffers, one after the other.
  [[nodiscard]] std::vector<uint8_t> bytes() const;
  [[nodiscard]] bool intact() const;
  Random& random() { return random_; }

 private:
  GuardedBuffer& add(int64_t bytes);

  Random random_;
  BufferStyle style_;
  std::vector<std::unique_ptr<GuardedBuffer>> buffers_;
};

// Dense strides of a shape, with `gap` elements after each row.
TensorView strided_view(void* data, DType dtype, const std::vector<int64_t>& shape,
                        int64_t gap = 0);

// Views of the copies on a device.
KvCodes on_device(const DeviceCopies& device, const KvCodes& codes);
KvScale on_device(const DeviceCopies& device, const KvScale& scale);
PagedKvCache on_device(const DeviceCopies& device, const PagedKvCache& cache);
KvPositions on_device(const DeviceCopies& device, const KvPositions& positions);

}  // namespace narrowfloat::testing

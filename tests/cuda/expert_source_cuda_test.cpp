// Weights that come an expert at a time on a GPU, all in the same memory: the bits of whole
// weights, and no second copy of everything.
#include <algorithm>

#include "cuda/gpu_test.h"
#include "support/gpu_moe.h"

namespace narrowfloat::testing {
namespace {

constexpr MoeShape kSourceShape{
    .tokens = 19, .hidden = 256, .inter = 384, .experts = 6, .top_k = 3};

class ExpertSourcesOnTheGpu : public GpuTestWith<MoeMode> {};
INSTANTIATE_TEST_SUITE_P(Moe, ExpertSourcesOnTheGpu, ::testing::ValuesIn(every_gpu_moe_mode()),
                         mode_test_name);

// A weight of one expert on the GPU.
class ExpertOnTheGpu {
 public:
  WeightView hold(const WeightView& host) {
    WeightView view = host;
    view.values.data =
        sent(values_, host.values.data, host.values.num_elements() * bits(host.values.dtype) / 8);
    view.values.device = gpu();
    if (host.scales.data == nullptr) return view;
    view.scales.data =
        sent(scales_, host.scales.data, host.scales.capacity * bytes(host.scales.type));
    view.scales.device = gpu();
    return view;
  }
  void forget() const {
    for (const DeviceBuffer* buffer : {&values_, &scales_}) {
      if (buffer->data() != nullptr) buffer->fill(0xFF);
    }
  }

 private:
  static uint8_t* sent(DeviceBuffer& buffer, const void* host, int64_t bytes) {
    if (buffer.size() != bytes) buffer = DeviceBuffer(bytes);
    buffer.write(host, bytes);
    return buffer.data();
  }

  DeviceBuffer values_, scales_;
};

TEST_P(ExpertSourcesOnTheGpu, GiveTheBitsOfWholeWeights) {
  MoeCase layer_case(GetParam(), kSourceShape, Activation::swiglu(), 41);
  const MoeResult expected = run_on_gpu(prepare_on_gpu(layer_case), layer_case);
  ExpertOnTheGpu first;
  ExpertOnTheGpu second;
  MoeWeights weights = layer_case.weights();
  weights.w1 = weights.w2 = {};
  weights.w1_source = [&](int64_t expert) {
    return first.hold(layer_case.shard(static_cast<int32_t>(expert), 1).w1);
  };
  weights.w2_source = [&](int64_t expert) {
    return second.hold(layer_case.shard(static_cast<int32_t>(expert), 1).w2);
  };
  const MoeLayer layer = prepare_on_gpu(weights, layer_case.config());
  first.forget();
  second.forget();
  EXPECT_EQ(run_on_gpu(layer, layer_case), expected);
}

class ExpertSourceMemory : public GpuTest {};

TEST_F(ExpertSourceMemory, HoldsThePackedWeightsAndOneExpert) {
  constexpr int64_t kExperts = 16;
  constexpr int64_t kRows = 4096;
  constexpr int64_t kCols = 2048;
  constexpr int64_t kSlack = int64_t{8} << 20;  // Slack for the allocator and for tables.
  for (const MoeMode mode : {MoeMode::kBf16, MoeMode::kFp8Tensor}) {
    const DType dtype = mode == MoeMode::kBf16 ? DType::kBF16 : DType::kF8E4M3;
    const DeviceBuffer expert_memory(kRows * kCols * bits(dtype) / 8);
    expert_memory.fill(0x3C);
    int64_t least = free_device_memory();
    const ExpertSource source = [&](int64_t /*expert*/) {
      least = std::min(least, free_device_memory());
      return WeightView{
          .values = TensorView::contiguous(expert_memory.data(), dtype, {1, kRows, kCols}, gpu()),
          .scales = {}};
    };
    static_cast<void>(GroupedWeights::prepare(source, 1, mode, gpu()));  // Loads the kernels.
    const int64_t before = least = free_device_memory();
    const GroupedWeights weights = GroupedWeights::prepare(source, kExperts, mode, gpu());
    least = std::min(least, free_device_memory());
    EXPECT_GE(before - least, weights.bytes());  // The measure works.
    EXPECT_LE(before - least, weights.bytes() + kSlack) << name(mode);
    EXPECT_LE(static_cast<double>(weights.bytes()),
              1.05 * static_cast<double>(kExperts * expert_memory.size()));
  }
}

}  // namespace
}  // namespace narrowfloat::testing

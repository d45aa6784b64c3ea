// Layers on a GPU stage by stage against fp64 (moe spec 12.2, 12.3), with rows as long as those of
// real experts, where the bounds need no allowance for few codes; and NaN scales of one expert.
#include <cstring>

#include "cuda/gpu_test.h"
#include "support/gpu_moe.h"
#include "support/moe_stages.h"

namespace narrowfloat::testing {
namespace {

class GpuPlace : public StagePlace {
 public:
  [[nodiscard]] Device device() const override { return gpu(); }
  [[nodiscard]] Stream stream() const override { return stream_.get(true); }
  TensorView moved(const TensorView& host) override { return tensors_.copy(host); }
  ScaleView moved(const ScaleView& host) override { return tensors_.copy(host); }
  uint8_t* memory(int64_t bytes) override {
    buffers_.emplace_back(bytes, DeviceBufferStyle{.poison = 0xFF});
    return buffers_.back().data();
  }
  [[nodiscard]] std::vector<uint8_t> read(const uint8_t* memory, int64_t bytes) const override {
    stream_.synchronize();
    for (const DeviceBuffer& buffer : buffers_) {
      if (memory < buffer.data() || memory + bytes > buffer.data() + buffer.size()) continue;
      std::vector<uint8_t> host(static_cast<size_t>(bytes));
      buffer.read(host.data(), bytes, memory - buffer.data());
      return host;
    }
    ADD_FAILURE() << "memory of another place";
    return std::vector<uint8_t>(static_cast<size_t>(bytes));
  }

 private:
  DeviceTensors tensors_;
  std::vector<DeviceBuffer> buffers_;
  CudaStream stream_;
};

class MoeStagesOnTheGpu : public GpuTestWith<MoeMode> {};
INSTANTIATE_TEST_SUITE_P(Moe, MoeStagesOnTheGpu, ::testing::ValuesIn(every_gpu_moe_mode()),
                         mode_test_name);

// GeGLU is an operation of its own everywhere, so that the first GEMM's result can be seen.
TEST_P(MoeStagesOnTheGpu, AreWithinTheBoundsOfTheSpecification) {
  const MoeShape shape{.tokens = 24, .hidden = 512, .inter = 1024, .experts = 4, .top_k = 2};
  for (const bool is_fused : {true, false}) {
    SCOPED_TRACE(is_fused ? "swiglu" : "geglu");
    const Activation activation =
        is_fused ? Activation::swiglu() : Activation{.kind = ActivationKind::kGegluTanh};
    MoeCase layer_case(GetParam(), shape, activation, 51);
    layer_case.add_biases();
    GpuPlace place;
    expect_stages_close(layer_case, place, !is_fused);
  }
}

// NaN as a block scale of an expert's first weights, or as a code where there are none.
void plant_nan(MoeCase& layer_case, int64_t expert) {
  const WeightView own = layer_case.shard(static_cast<int32_t>(expert), 1).w1;
  if (own.scales.data == nullptr) {
    const bool is_bf16 = own.values.dtype == DType::kBF16;
    std::memset(const_cast<void*>(own.values.data), is_bf16 ? 0xFF : 0x7F, 2);
    return;
  }
  const ScaleType type = own.scales.type;
  std::memset(own.scales.data, type == ScaleType::kE4M3 ? 0x7F : 0xFF,
              static_cast<size_t>(bytes(type)));
}

TEST_P(MoeStagesOnTheGpu, ANanScaleStaysInItsExpert) {
  const MoeShape shape{.tokens = 40, .hidden = 256, .inter = 256, .experts = 8, .top_k = 2};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 52);
  const MoeResult clean = run_on_gpu(prepare_on_gpu(layer_case), layer_case);
  plant_nan(layer_case, 3);
  const MoeResult result = run_on_gpu(prepare_on_gpu(layer_case), layer_case);
  const auto* const ids = reinterpret_cast<const int32_t*>(result.topk_ids.data());
  int64_t reached = 0;
  for (int64_t token = 0; token < shape.tokens; ++token) {
    const bool reaches = ids[2 * token] == 3 || ids[2 * token + 1] == 3;
    reached += reaches ? 1 : 0;
    const size_t row_bytes = result.out.size() / static_cast<size_t>(shape.tokens);
    const size_t begin = static_cast<size_t>(token) * row_bytes;
    const bool is_same = std::memcmp(&result.out[begin], &clean.out[begin], row_bytes) == 0;
    EXPECT_EQ(is_same, !reaches) << "token " << token;
  }
  EXPECT_TRUE(reached > 0 && reached < shape.tokens);
}

}  // namespace
}  // namespace narrowfloat::testing

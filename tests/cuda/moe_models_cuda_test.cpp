// Layers of real models on a GPU at their own widths (moe spec 13.1 C and L, 16): some of their
// experts, as a rank of an expert-parallel group holds them, which tokens prefer. The CPU computes
// 67 tokens; larger batches consist of them, and all their rows are compared: 1024 tokens, 16384 of
// one model and, with NARROWFLOAT_LARGE, of all.
#include <gtest/gtest.h>

#include "cli_common/moe/figures.h"
#include "cuda/gpu_test.h"
#include "support/gpu_moe.h"
#include "support/moe_batch.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kModelTokens = 67;

struct RealModel {
  const char* name;
  MoeMode mode;
  int64_t hidden, inter;
  int32_t experts, top_k;
  int32_t local = 2;  // Experts of this rank.
  RoutingMethod method = RoutingMethod::kRenormalize;
  int32_t n_group = 1, topk_group = 1;
  float routed_scale = 1.0F;
  bool is_gpt_oss = false;  // Biases, interleaved gate, clamped activation.
  int64_t most_tokens = 1024;
};

constexpr auto kDeepSeek = RoutingMethod::kDeepSeekV3;
constexpr RealModel deepseek_v3(MoeMode mode, int64_t most_tokens) {
  return {"deepseek_v3", mode, 7168, 2048, 256, 8, 2, kDeepSeek, 8, 4, 2.5F, false, most_tokens};
}
// Two groups of 128 columns meet in the middle of gpt-oss's last one; 128x128 blocks need 2944.
constexpr RealModel gpt_oss(const char* name, MoeMode mode, int32_t experts) {
  const int64_t width = mode == MoeMode::kFp8Block ? 2944 : 2880;
  return {name, mode, width, width, experts, 4, 2, RoutingMethod::kRenormalize, 1, 1, 1.0F, true};
}
const RealModel kModels[] = {
    deepseek_v3(MoeMode::kFp8Block, 16384),
    deepseek_v3(MoeMode::kNvfp4, 1024),
    {"kimi_k2", MoeMode::kNvfp4Fp8Rounded, 7168, 2048, 384, 8, 2, kDeepSeek, 1, 1, 2.827F},
    gpt_oss("gpt_oss_20b", MoeMode::kBf16, 32),
    gpt_oss("gpt_oss_20b", MoeMode::kFp8Block, 32),
    gpt_oss("gpt_oss_20b", MoeMode::kMxfp4Mxfp8, 32),
    gpt_oss("gpt_oss_20b", MoeMode::kMxfp4Bf16, 32),
    gpt_oss("gpt_oss_20b", MoeMode::kMxfp4Fp8, 32),
    gpt_oss("gpt_oss_20b", MoeMode::kNvfp4, 32),
    gpt_oss("gpt_oss_20b", MoeMode::kNvfp4PerToken, 32),
    gpt_oss("gpt_oss_120b", MoeMode::kMxfp4Bf16, 128),
    {"qwen3_30b", MoeMode::kBf16, 2048, 768, 128, 8, 8},
    {"qwen3_30b", MoeMode::kNvfp4Bf16, 2048, 768, 128, 8, 8},
    {"mixtral_8x7b", MoeMode::kNvfp4Fp8Exact, 4096, 14336, 8, 2, 1},
    {"mixtral_8x7b", MoeMode::kMxfp8, 4096, 14336, 8, 2, 1},
    {"llama4_scout", MoeMode::kFp8Tensor, 5120, 8192, 16, 1, 1, RoutingMethod::kLlama4},
};

// A layer of the model's second half of experts, or what there is of them.
class RealCase {
 public:
  explicit RealCase(const RealModel& model)
      : case_(model.mode,
              {.tokens = kModelTokens,
               .hidden = model.hidden,
               .inter = model.inter,
               .experts = model.local,
               .top_k = model.top_k},
              model.is_gpt_oss ? Activation::swiglu_oai(1.702F, 1.0F, 7.0F) : Activation::swiglu(),
              81) {
    MoeConfig& config = case_.config();
    config.routing.experts = model.experts;
    config.routing.method = model.method;
    config.routing.n_group = model.n_group;
    config.routing.topk_group = model.topk_group;
    config.routing.routed_scale = model.routed_scale;
    config.expert_offset = model.experts / 2;
    config.weight_on_input = model.method == RoutingMethod::kLlama4;
    if (model.is_gpt_oss) {
      config.gate_order = GateOrder::kInterleaved;
      case_.add_biases();
    }
    Random random(82);
    for (int64_t i = 0; i < kModelTokens * model.experts; ++i) {
      const int64_t expert = i % model.experts - config.expert_offset;
      const bool is_local = expert >= 0 && expert < model.local;
      logits_.push_back(random.normal() + (is_local ? 2.0F : 0.0F));
    }
    for (int32_t i = 0; i < model.experts; ++i) bias_.push_back(0.125F * random.normal());
    Routing& routing = case_.routing();
    routing.logits =
        TensorView::contiguous(logits_.data(), DType::kF32, {kModelTokens, model.experts});
    if (model.method != kDeepSeek) return;
    routing.bias = TensorView::contiguous(bias_.data(), DType::kF32, {model.experts});
  }
  MoeCase& layer_case() { return case_; }

 private:
  MoeCase case_;
  std::vector<float> logits_;
  std::vector<float> bias_;
};

using MoeModelsOnTheGpu = GpuTestWith<RealModel>;
INSTANTIATE_TEST_SUITE_P(Moe, MoeModelsOnTheGpu, ::testing::ValuesIn(kModels),
                         [](const auto& param) {
                           return std::string(param.param.name) + "_" +
                                  std::string(name(param.param.mode));
                         });

// Outputs alone: the slots of many tokens are gigabytes.
void expect_outputs_repeat(const MoeLayer& layer, MoeCase& layer_case, const MoeResult& oracle) {
  const MoeConfig& config = layer.config();
  const int64_t tokens = layer_case.inputs().values.shape[0];
  const GpuMoeRun run(layer, layer_case);
  run.poison(0xFF);
  const CudaStream stream;
  run.queue(stream.get(true));
  stream.synchronize();
  const std::vector<float> first = run.output_of(0, kModelTokens);
  const cli::Distance apart =
      cli::distance(first, as_floats(oracle.out, config.out_dtype), config.hidden);
  EXPECT_LE(apart.rel, cli::tolerance(config.mode).rel);
  EXPECT_LE(apart.row, cli::tolerance(config.mode).row);
  for (int64_t begin = kModelTokens; begin < tokens; begin += kModelTokens) {
    const int64_t count = std::min(kModelTokens, tokens - begin);
    const std::vector<float> again = run.output_of(begin, count);
    ASSERT_TRUE(std::equal(again.begin(), again.end(), first.begin())) << "from token " << begin;
  }
}

TEST_P(MoeModelsOnTheGpu, AgreeWithTheCpu) {
  RealCase real(GetParam());
  MoeCase& layer_case = real.layer_case();
  const MoeResult oracle = fp64_reference(layer_case);
  const MoeLayer layer = prepare_on_gpu(layer_case);
  for (const int64_t tokens : {int64_t{1}, kModelTokens}) {
    SCOPED_TRACE(std::to_string(tokens) + " tokens");
    const RepeatedTokens batch(layer_case, tokens);
    expect_batch_close(layer_case, layer, oracle, run_on_gpu(layer, layer_case));
  }
  const int64_t most = is_large_run() ? 16384 : GetParam().most_tokens;
  SCOPED_TRACE(std::to_string(most) + " tokens");
  const RepeatedTokens batch(layer_case, most);
  expect_outputs_repeat(layer, layer_case, oracle);
}

}  // namespace
}  // namespace narrowfloat::testing

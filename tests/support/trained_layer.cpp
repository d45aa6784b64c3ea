// See trained_layer.h.
#include "support/trained_layer.h"

#include <cstring>
#include <filesystem>

#include "support/moe_case.h"

namespace narrowfloat::testing {
namespace {

constexpr int64_t kTrainedHidden = 256;
constexpr int64_t kTrainedExperts = 16;

std::vector<uint8_t> read_tensor(const SafetensorsReader& file, const std::string& tensor,
                                 size_t bytes) {
  std::vector<uint8_t> data(bytes);
  file.read(*file.find(tensor), 0, std::as_writable_bytes(std::span(data)));
  return data;
}

}  // namespace

std::string trained_model() {
  const std::string here = "models/tiny-moe";
  return std::filesystem::exists(here) ? here : NARROWFLOAT_SOURCE_DIR "/" + here;
}

MoeInputs RecordedTokens::inputs() const {
  MoeInputs inputs;
  inputs.values = TensorView::contiguous(x.data(), DType::kBF16, {tokens, kTrainedHidden});
  return inputs;
}

Routing RecordedTokens::routing() const {
  Routing routing;
  routing.logits = TensorView::contiguous(logits.data(), DType::kF32, {tokens, kTrainedExperts});
  return routing;
}

RecordedTokens recorded_tokens(int64_t layer, int64_t tokens) {
  const SafetensorsReader file(trained_model() + "/calibration/activations.safetensors");
  const std::string prefix = "layers." + std::to_string(layer) + ".";
  RecordedTokens result{.tokens = tokens, .x = {}, .logits = {}, .output = {}};
  result.x.resize(static_cast<size_t>(tokens * kTrainedHidden));
  result.logits.resize(static_cast<size_t>(tokens * kTrainedExperts));
  const auto x = read_tensor(file, prefix + "hidden_states", result.x.size() * 2);
  const auto logits = read_tensor(file, prefix + "router_logits", result.logits.size() * 4);
  std::memcpy(result.x.data(), x.data(), x.size());
  std::memcpy(result.logits.data(), logits.data(), logits.size());
  result.output = read_tensor(file, prefix + "output", result.x.size() * 2);
  return result;
}

LoadMoeOptions options_for(MoeMode mode) {
  LoadMoeOptions options;
  options.mode = mode;
  if (mode == MoeMode::kFp8Tensor || mode == MoeMode::kNvfp4) {
    options.input_amax = 16.0F;
    options.inter_amax = 16.0F;
  }
  return options;
}

double loss_bound(MoeMode mode) {
  switch (mode) {
    case MoeMode::kBf16:
      return 3e-3;
    case MoeMode::kFp8Tensor:
    case MoeMode::kFp8Block:
    case MoeMode::kMxfp8:
      return 0.06;
    case MoeMode::kNvfp4:
    case MoeMode::kNvfp4PerToken:
      return 0.2;
    case MoeMode::kNvfp4Bf16:
    case MoeMode::kNvfp4Fp8Exact:
    case MoeMode::kNvfp4Fp8Rounded:
    case MoeMode::kNvfp4Fp8Token:
    case MoeMode::kNvfp4Int8:
      return 0.14;
    case MoeMode::kMxfp4Bf16:
    case MoeMode::kMxfp4Fp8:
    case MoeMode::kMxfp4Fp8Token:
    case MoeMode::kMxfp4Mxfp8:
    case MoeMode::kMxfp4Int8:
      return 0.2;
  }
  return 0;
}

std::vector<float> run_layer(const MoeLayer& layer, const RecordedTokens& recorded) {
  const MoeConfig& config = layer.config();
  const int64_t tokens = recorded.tokens;
  std::vector<uint8_t> out(
      static_cast<size_t>(tokens * config.hidden * bits(config.out_dtype) / 8));
  std::vector<uint8_t> memory(static_cast<size_t>(layer.required_workspace(tokens)) + 256);
  auto* aligned =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
  MoeOutputs outputs;
  outputs.out = TensorView::contiguous(out.data(), config.out_dtype, {tokens, config.hidden});
  layer.run(recorded.inputs(), recorded.routing(), outputs,
            TensorView::contiguous(aligned, DType::kU8, {layer.required_workspace(tokens)}));
  return as_floats(out, config.out_dtype);
}

std::vector<float> run_unquantized(int64_t layer, const RecordedTokens& recorded) {
  const LoadedMoe plain(Checkpoint(trained_model()), layer);
  MoeConfig exact = plain.config();
  exact.slot_dtype = DType::kF32;
  exact.out_dtype = DType::kF32;
  return run_layer(
      MoeLayer::prepare_reference(plain.weights(), exact,
                                  {.accumulation = Accumulation::kFp64, .fp32_rows = true}),
      recorded);
}

}  // namespace narrowfloat::testing

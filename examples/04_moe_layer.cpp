// Runs a Mixture-of-Experts layer of a model on activations that were recorded from it: with bf16
// weights, then with the same experts in NVFP4, and says how far apart the outputs are:
//     04_moe_layer models/tiny-moe
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "narrowfloat/narrowfloat.h"

namespace nf = narrowfloat;

namespace {

// A matrix of a file; `bytes` holds it.
nf::TensorView read(const nf::SafetensorsReader& file, const char* name,
                    std::vector<std::byte>* bytes) {
  const nf::TensorInfo* info = file.find(name);
  if (info == nullptr) throw nf::Error(nf::ErrorKind::kCorruptData, file.path() + ": no " + name);
  bytes->resize(info->size_bytes);
  file.read(*info, 0, *bytes);
  return nf::TensorView::contiguous(bytes->data(), info->dtype,
                                    {info->shape.at(0), info->shape.at(1)});
}

// Layer 0 in `mode`: its output for x, fp32 [T, H].
std::vector<float> run(const nf::Checkpoint& model, nf::MoeMode mode, const nf::TensorView& x,
                       const nf::TensorView& logits) {
  nf::LoadMoeOptions options;
  options.mode = mode;
  const nf::LoadedMoe loaded(model, 0, options);
  nf::MoeConfig config = loaded.config();
  config.out_dtype = nf::DType::kF32;
  const nf::MoeLayer layer = nf::MoeLayer::prepare(loaded.weights(), config);

  // The caller owns all memory. The workspace is aligned to 256 bytes.
  const int64_t tokens = x.shape[0];
  const int64_t bytes = layer.required_workspace(tokens);
  std::vector<uint8_t> memory(static_cast<size_t>(bytes) + 256);
  uint8_t* workspace = memory.data() + 256 - reinterpret_cast<uintptr_t>(memory.data()) % 256;
  std::vector<float> out(static_cast<size_t>(tokens * config.hidden));
  nf::Routing routing;
  routing.logits = logits;
  nf::MoeOutputs outputs;
  outputs.out = nf::TensorView::contiguous(out.data(), nf::DType::kF32, {tokens, config.hidden});
  layer.run({.values = x, .scales = {}, .row_scale = {}}, routing, outputs,
            nf::TensorView::contiguous(workspace, nf::DType::kU8, {bytes}));
  std::printf("%-10s  %.2f MB of weights, %.2f MB of workspace\n", nf::name(mode).data(),
              static_cast<double>(layer.weight_bytes()) / 1e6, static_cast<double>(bytes) / 1e6);
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: 04_moe_layer MODEL\n");
    return 2;
  }
  try {
    const nf::Checkpoint model(argv[1]);
    const nf::SafetensorsReader recorded(model.path() + "/calibration/activations.safetensors");
    std::vector<std::byte> x_bytes;
    std::vector<std::byte> logits_bytes;
    const nf::TensorView x = read(recorded, "layers.0.hidden_states", &x_bytes);
    const nf::TensorView logits = read(recorded, "layers.0.router_logits", &logits_bytes);
    const std::vector<float> plain = run(model, nf::MoeMode::kBf16, x, logits);
    const std::vector<float> coded = run(model, nf::MoeMode::kNvfp4Bf16, x, logits);
    double error = 0;
    double norm = 0;
    for (size_t i = 0; i < plain.size(); ++i) {
      error += std::pow(double{coded[i]} - double{plain[i]}, 2);
      norm += std::pow(double{plain[i]}, 2);
    }
    std::printf("relative error of nvfp4_bf16: %.4f\n", std::sqrt(error / norm));
  } catch (const nf::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

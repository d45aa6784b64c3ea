// golden_layers MODE OUT.safetensors: runs the layers of tests/golden/vectors/moe/MODE.safetensors
// through the C++ API and writes everything that they give, so that the tests of the Python package
// can ask for the same bytes. Tensors are named CASE.ACCUMULATION.OUTPUT, as in 3.float32.slot_out.
// NARROWFLOAT_FORCE chooses the implementations. Outputs start as 0xA5, and what is not written
// stays so.
#include <cstdio>
#include <exception>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "golden/moe_golden_case.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat::testing {
namespace {

constexpr uint8_t kUnwritten = 0xA5;

using Named = std::pair<std::string, OwnedTensor>;

struct alignas(256) Chunk {  // A part of a workspace.
  uint8_t bytes[256] = {};
};

void run_case(const MoeGoldenFile& file, size_t index, Accumulation accumulation,
              std::vector<Named>& results) {
  const MoeGoldenCase given(file, index);
  const MoeConfig config = given.config();
  const auto layer =
      MoeLayer::prepare_reference(given.weights(), config, given.reference(accumulation));
  const std::vector<int64_t>& shape = given.tensor("out").shape;
  const int64_t tokens = shape.at(0);
  const int64_t slots = config.routing.top_k + config.routing.shared_experts;
  const std::string prefix =
      std::to_string(index) + (accumulation == Accumulation::kFp64 ? ".float64." : ".float32.");
  // A tensor that moves leaves its bytes where they are.
  const auto make = [&](const char* name, DType dtype, std::vector<int64_t> extents) {
    OwnedTensor tensor(dtype, std::move(extents), kUnwritten);
    return results.emplace_back(prefix + name, std::move(tensor)).second.view();
  };
  MoeOutputs outputs{
      .out = make("out", config.out_dtype, shape),
      .slot_out = make("slot_out", config.slot_dtype, {layer.max_rows(tokens), config.hidden}),
      .expert_weights = make("expert_weights", DType::kF32, {tokens, slots}),
      .slot_to_row = make("slot_to_row", DType::kI32, {tokens * slots}),
      .topk_ids = make("topk_ids", DType::kI32, {tokens, slots}),
      .routing_replay = {},
      .errors = nullptr};
  if (config.routing.shared_experts == 0) {
    outputs.routing_replay = make("routing_replay", DType::kI16, {tokens, slots});
  }
  const int64_t bytes = layer.required_workspace(tokens);
  std::vector<Chunk> space(static_cast<size_t>(bytes / 256 + 1));
  layer.run(given.inputs(), given.routing(), outputs,
            TensorView::contiguous(space.data(), DType::kU8, {bytes}));
}

void write(const std::vector<Named>& results, const std::string& path) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : results) specs.push_back({name, tensor.dtype, tensor.shape});
  SafetensorsWriter writer(path, specs, {});
  for (const auto& [name, tensor] : results) {
    writer.write(name, 0, std::as_bytes(std::span(tensor.bytes)));
  }
  writer.commit();
}

void run(const std::string& mode, const std::string& path) {
  const MoeGoldenFile file(mode);
  std::vector<Named> results;
  for (size_t i = 0; i < file.cases().size(); ++i) {
    for (const Accumulation accumulation : {Accumulation::kFp32, Accumulation::kFp64}) {
      run_case(file, i, accumulation, results);
    }
  }
  write(results, path);
}

}  // namespace
}  // namespace narrowfloat::testing

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: golden_layers MODE OUT.safetensors\n", stderr);
    return 2;
  }
  try {
    narrowfloat::testing::run(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "golden_layers: %s\n", error.what());
    return 1;
  }
  return 0;
}

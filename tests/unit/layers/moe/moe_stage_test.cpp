// Runs of a layer that end early: what is written, and the names of the stages.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/error.h"
#include "narrowfloat/moe.h"
#include "support/moe_case.h"

namespace narrowfloat::testing {
namespace {

constexpr uint8_t kPoison = 0xCC;
using Bytes = std::vector<uint8_t>;

// Outputs that every run may write, poisoned before.
struct StageOutputs {
  Bytes ids, slot_to_row, slot_rows, out;
  bool operator==(const StageOutputs&) const = default;
};

StageOutputs run_until(MoeCase& layer_case, const MoeLayer& layer, MoeStage last) {
  const int64_t tokens = layer_case.shape().tokens;
  const int64_t hidden = layer_case.shape().hidden;
  const int64_t slots = layer_case.shape().top_k;
  const int64_t rows = layer.max_rows(tokens);
  const auto poisoned = [](int64_t size) { return Bytes(static_cast<size_t>(size), kPoison); };
  StageOutputs bytes{poisoned(tokens * slots * 4), poisoned(tokens * slots * 4),
                     poisoned(rows * hidden * 2), poisoned(tokens * hidden * 2)};
  MoeOutputs outputs;
  outputs.topk_ids = TensorView::contiguous(bytes.ids.data(), DType::kI32, {tokens, slots});
  outputs.slot_to_row =
      TensorView::contiguous(bytes.slot_to_row.data(), DType::kI32, {tokens * slots});
  outputs.slot_out = TensorView::contiguous(bytes.slot_rows.data(), DType::kBF16, {rows, hidden});
  outputs.out = TensorView::contiguous(bytes.out.data(), DType::kBF16, {tokens, hidden});
  const int64_t size = layer.required_workspace(tokens);
  const GuardedBuffer workspace(size + 256, {});
  const auto address = (reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256;
  layer.run_up_to(last, layer_case.inputs(), layer_case.routing(), outputs,
                  TensorView::contiguous(reinterpret_cast<uint8_t*>(address), DType::kU8, {size}));
  EXPECT_TRUE(workspace.intact());
  return bytes;
}

// The whole run's bytes once the stage that writes them has run, poison before.
void expect_from(MoeStage stage, MoeStage last, const Bytes& whole, const Bytes& actual) {
  EXPECT_EQ(actual, last >= stage ? whole : Bytes(whole.size(), kPoison))
      << name(stage) << " of a run until " << name(last);
}

TEST(MoeStage, ARunWritesWhatItsStagesWrite) {
  MoeCase layer_case(MoeMode::kFp8Block, {}, Activation::swiglu(), 1);
  const MoeLayer layer = layer_case.prepare();
  const StageOutputs whole = run_until(layer_case, layer, MoeStage::kCombine);
  for (const MoeStage last : all_moe_stages()) {
    const StageOutputs part = run_until(layer_case, layer, last);
    expect_from(MoeStage::kRoute, last, whole.ids, part.ids);
    expect_from(MoeStage::kPermute, last, whole.slot_to_row, part.slot_to_row);
    expect_from(MoeStage::kSecondGemm, last, whole.slot_rows, part.slot_rows);
    expect_from(MoeStage::kCombine, last, whole.out, part.out);
  }
}

TEST(MoeStage, NamesAreThoseOfTheStagesInOrder) {
  std::string names;
  for (const MoeStage stage : all_moe_stages()) names += std::string(name(stage)) + " ";
  EXPECT_EQ(names, "route permute quantize_input first_gemm activation second_gemm combine ");
}

TEST(MoeStage, RefusesWhatIsNoStage) {
  MoeCase layer_case(MoeMode::kBf16, {}, Activation::swiglu(), 2);
  const MoeLayer layer = layer_case.prepare();
  EXPECT_THROW(run_until(layer_case, layer, static_cast<MoeStage>(7)), Error);
}

}  // namespace
}  // namespace narrowfloat::testing

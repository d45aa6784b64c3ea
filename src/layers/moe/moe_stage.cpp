// The names of the stages of a layer.
#include <array>

#include "base/name_table.h"
#include "narrowfloat/moe.h"

namespace narrowfloat {
namespace {

struct StageName {
  MoeStage id;
  std::string_view name;
};

constexpr std::array<StageName, 7> kStageNames{{
    {MoeStage::kRoute, "route"},
    {MoeStage::kPermute, "permute"},
    {MoeStage::kQuantizeInput, "quantize_input"},
    {MoeStage::kFirstGemm, "first_gemm"},
    {MoeStage::kActivation, "activation"},
    {MoeStage::kSecondGemm, "second_gemm"},
    {MoeStage::kCombine, "combine"},
}};

constexpr auto kStages = [] {
  std::array<MoeStage, kStageNames.size()> stages{};
  for (size_t i = 0; i < stages.size(); ++i) stages[i] = kStageNames[i].id;
  return stages;
}();

}  // namespace

std::string_view name(MoeStage stage) {
  return record_of(kStageNames, stage, "stage of a layer").name;
}

std::span<const MoeStage> all_moe_stages() { return kStages; }

}  // namespace narrowfloat

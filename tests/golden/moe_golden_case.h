// Cases of tests/golden/vectors/moe: safetensors files with the description of their cases in the
// metadata, turned into what the MoE operations and the layer take. README.md has the file format.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "narrowfloat/moe.h"
#include "narrowfloat/safetensors.h"

namespace narrowfloat::testing {

using Json = nlohmann::json;

// An owned dense tensor.
struct OwnedTensor {
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;

  OwnedTensor() = default;
  OwnedTensor(DType type, std::vector<int64_t> extents, uint8_t fill);
  [[nodiscard]] int64_t count() const;
  [[nodiscard]] TensorView view() const;
  // Integers, and F8_E8M0 as its byte, are values too.
  [[nodiscard]] double at(int64_t index) const;
  // `rows` of the first extent: row i is row source[i] here.
  [[nodiscard]] OwnedTensor gathered(const std::vector<int64_t>& source) const;
};

class MoeGoldenFile {
 public:
  explicit MoeGoldenFile(std::string_view name);

  [[nodiscard]] const Json& cases() const { return cases_; }
  [[nodiscard]] bool has(const std::string& name) const { return tensors_.contains(name); }
  [[nodiscard]] const OwnedTensor& tensor(const std::string& name) const;

 private:
  Json cases_;
  std::map<std::string, OwnedTensor> tensors_;
};

RoutingConfig routing_config(const Json& router);

// Views of a case; it must outlive them.
class MoeGoldenCase {
 public:
  MoeGoldenCase(const MoeGoldenFile& file, size_t index);

  [[nodiscard]] const Json& plan() const { return plan_; }
  [[nodiscard]] const Json& expect() const { return plan_.at("expect"); }
  [[nodiscard]] bool has(const std::string& name) const { return file_.has(prefix_ + name); }
  [[nodiscard]] const OwnedTensor& tensor(const std::string& name) const {
    return file_.tensor(prefix_ + name);
  }
  [[nodiscard]] TensorView view_or_absent(const std::string& name) const;

  [[nodiscard]] MoeConfig config() const;
  [[nodiscard]] MoeReferenceOptions reference(Accumulation accumulation) const;
  [[nodiscard]] const MoeWeights& weights() const { return weights_; }
  [[nodiscard]] MoeInputs inputs() const;
  [[nodiscard]] Routing routing() const;
  [[nodiscard]] RowFormat intermediate() const;
  [[nodiscard]] int32_t weight_experts() const { return experts_; }
  // True where the file has the rows that the first GEMM reads.
  [[nodiscard]] bool has_coded_input() const;

 private:
  struct Matrix {
    OwnedTensor values;
    OwnedTensor scales;
    ScaleLayoutId layout = ScaleLayoutId::kLinear;
    int64_t scale_rows = 0;
    int64_t blocks = 0;
  };
  [[nodiscard]] Matrix make_matrix(const std::string& name, int64_t rows, int64_t cols) const;
  [[nodiscard]] WeightView weight_view(const Matrix& matrix) const;
  [[nodiscard]] OwnedTensor make_bias(const std::string& name, int64_t width) const;
  [[nodiscard]] PerExpert per_expert(const std::string& name, float otherwise) const;
  [[nodiscard]] Activation activation() const;

  const MoeGoldenFile& file_;
  std::string prefix_;
  Json plan_;
  const MoeModeInfo& mode_;
  int32_t experts_;
  Matrix w1_;
  Matrix w2_;
  OwnedTensor bias1_;
  OwnedTensor bias2_;
  OwnedTensor column_scales_;  // Scales of the input, where a row's scales are not neighbours.
  MoeWeights weights_;
};

}  // namespace narrowfloat::testing

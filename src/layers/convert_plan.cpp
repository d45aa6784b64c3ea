// See convert_plan.h.
#include "layers/convert_plan.h"

#include <array>
#include <map>
#include <set>

#include "base/throw_error.h"
#include "checkpoint/conventions/fit.h"
#include "checkpoint/escape.h"
#include "layers/moe/expert_names.h"
#include "layers/selection.h"
#include "layers/weight_reader.h"
#include "tensor/block_math.h"

namespace narrowfloat {
namespace {

constexpr std::array<std::string_view, 3> kMatrixNames = {"gate_proj", "up_proj", "down_proj"};

class Planner {
 public:
  Planner(std::span<const LogicalTensor> tensors, const ConventionSpec& to, bool keep_formats,
          const std::string& path)
      : tensors_(tensors), to_(to), keep_formats_(keep_formats), path_(path) {
    std::set<const ConventionSpec*> targets;
    for (const LogicalTensor& tensor : tensors) {
      by_name_.emplace(tensor.name, &tensor);
      if (tensor.convention) targets.insert(&target_of(tensor));
    }
    is_mixed_ = targets.size() > 1;
  }

  ConvertPlan run() {
    for (const LogicalTensor& tensor : tensors_) {
      if (!tensor.convention) continue;
      const bool is_stacked = convention_spec(*tensor.convention).is_stacked;
      if (is_stacked == target_of(tensor).is_stacked) {
        add_same_layout(tensor);
      } else if (is_stacked) {
        split(tensor);
      } else {
        collect_expert(tensor);
      }
    }
    for (const auto& [block, experts] : layers_) stack(block, experts);
    for (const LogicalTensor& tensor : tensors_) {
      if (!tensor.convention && !moved_.contains(&tensor)) plan_.copies.push_back(&tensor);
    }
    return std::move(plan_);
  }

 private:
  using Experts = std::map<int64_t, std::array<const LogicalTensor*, 3>>;

  [[noreturn]] void refuse(const LogicalTensor& tensor, const std::string& why) const {
    throw_error(ErrorKind::kUnsupported, "{}: tensor '{}' cannot be converted to {}: {}",
                printable(path_), printable(tensor.name), to_.info.name, why);
  }

  [[noreturn]] void refuse_shape(const LogicalTensor& tensor, const std::string& wanted) const {
    throw_error(ErrorKind::kCorruptData, "{}: tensor '{}' must be {}, got {}", printable(path_),
                printable(tensor.name), wanted, shape_text(tensor.shape));
  }

  // The convention that a weight of the source gets.
  [[nodiscard]] const ConventionSpec& target_of(const LogicalTensor& tensor) const {
    const ConventionSpec& from = convention_spec(*tensor.convention);
    if (!keep_formats_ || stored_format(from.info) == stored_format(to_.info)) return to_;
    const ConventionSpec* companion = companion_of(to_, from);
    if (companion != nullptr) return *companion;
    refuse(tensor, fmt::format("option keep_formats keeps it in {}, which no convention stores "
                               "beside {}; convert to another one, or without the option",
                               stored_format(from.info), to_.info.name));
  }

  void check_cols(const LogicalTensor& tensor, int64_t cols) const {
    const int64_t multiple = column_multiple(format_info(target_of(tensor).info.format));
    if (cols % multiple != 0) {
      refuse(tensor, fmt::format("K = {} is not a multiple of {}", cols, multiple));
    }
  }

  // One weight of the source that stays one weight.
  void add_same_layout(const LogicalTensor& tensor) {
    const CodeMatrix matrix = code_matrix(tensor);
    const ConventionSpec& to = target_of(tensor);
    TargetWeight weight{.name = tensor.name, .shape = tensor.shape, .spec = &to};
    weight.rows = matrix.all_rows();
    weight.cols = matrix.cols;
    weight.sources = {{.tensor = &tensor}};
    check_cols(tensor, matrix.cols);
    if (to.is_stacked) {
      // The parts keep their names, which are of the original files or of Hugging Face.
      weight.parts = stacked_parts(matrix, tensor.parts[0], tensor.parts[1]);
    } else {
      weight.parts = parts_of(tensor, matrix.rows, matrix.cols);
    }
    plan_.weights.push_back(std::move(weight));
  }

  [[nodiscard]] TensorGroup parts_of(const LogicalTensor& weight, int64_t rows,
                                     int64_t cols) const {
    const std::string_view module = module_of(weight.name);
    if (module.empty()) refuse(weight, "its name does not end in '.weight'");
    return stored_parts(target_of(weight), std::string(module) + ".", rows, cols, is_mixed_);
  }

  [[nodiscard]] TensorGroup stacked_parts(const CodeMatrix& matrix, const std::string& values,
                                          const std::string& scales) const {
    const FormatInfo& format = format_info(to_.info.format);
    const int64_t blocks = matrix.cols / format.block_cols;
    const int64_t block_bytes = format.block_cols * format.element_bits / 8;
    return {{values, to_.values.dtypes.front(), {matrix.experts, matrix.rows, blocks, block_bytes}},
            {scales, to_.scales.dtypes.front(), {matrix.experts, matrix.rows, blocks}}};
  }

  // Stacked experts to one weight for each matrix of each expert.
  void split(const LogicalTensor& tensor) {
    const auto stacked = parse_stacked_name(tensor.name);
    if (!stacked || !stacked->is_transposed) {
      refuse(tensor,
             "only experts named as Hugging Face does ('model.layers.L.mlp.experts.gate_up_proj') "
             "have names of their own for each expert");
    }
    const CodeMatrix matrix = code_matrix(tensor);
    check_cols(tensor, matrix.cols);
    const int64_t ways = stacked->is_down ? 1 : 2;
    if (matrix.rows % ways != 0) refuse_shape(tensor, "as many rows of gate as of up");
    const LogicalTensor* bias = find_bias(tensor, matrix);
    for (int64_t expert = 0; expert < matrix.experts; ++expert) {
      for (int64_t way = 0; way < ways; ++way) {
        const size_t name = stacked->is_down ? 2 : static_cast<size_t>(way);
        const std::string module =
            fmt::format("{}.experts.{}.{}", stacked->block, expert, kMatrixNames[name]);
        const SourceRows source{&tensor, expert * matrix.rows + way, ways};
        TargetWeight weight{.name = module + ".weight", .spec = &target_of(tensor)};
        weight.rows = matrix.rows / ways;
        weight.cols = matrix.cols;
        weight.shape = {weight.rows, weight.cols};
        weight.sources = {source};
        weight.parts =
            stored_parts(*weight.spec, module + ".", weight.rows, weight.cols, is_mixed_);
        if (bias != nullptr) {
          plan_.biases.push_back({.tensor = {module + ".bias", bias->dtype, {weight.rows}},
                                  .cols = weight.rows,
                                  .sources = {{bias, source.first, ways}}});
        }
        plan_.weights.push_back(std::move(weight));
      }
    }
  }

  const LogicalTensor* find_bias(const LogicalTensor& weight, const CodeMatrix& matrix) {
    const auto found = by_name_.find(stacked_bias_name(weight.name));
    if (found == by_name_.end()) return nullptr;
    const LogicalTensor& bias = *found->second;
    if (bias.shape != std::vector{matrix.experts, matrix.rows}) {
      refuse_shape(bias, fmt::format("[{}, {}]", matrix.experts, matrix.rows));
    }
    moved_.insert(&bias);
    return &bias;
  }

  void collect_expert(const LogicalTensor& tensor) {
    const auto parsed = parse_expert_name(tensor.name);
    if (!parsed || !parsed->block.ends_with(".mlp")) {
      refuse(tensor,
             "it holds experts named 'model.layers.L.mlp.experts.E.gate_proj.weight' only; "
             "dequantize the checkpoint, or convert it to another convention");
    }
    layers_[std::string(parsed->block)][parsed->expert][static_cast<size_t>(parsed->matrix)] =
        &tensor;
  }

  // The experts of a layer to stacked ones.
  void stack(const std::string& block, const Experts& experts) {
    int64_t next = 0;
    for (const auto& [expert, matrices] : experts) {
      for (size_t i = 0; i < matrices.size(); ++i) {
        if (expert == next && matrices[i] != nullptr) continue;
        throw_error(ErrorKind::kCorruptData,
                    "{}: '{}.experts.{}.{}.weight' is missing or not quantized, so the experts "
                    "cannot be stacked",
                    printable(path_), printable(block), next, kMatrixNames[i]);
      }
      ++next;
    }
    const std::vector<int64_t> first = experts.begin()->second[0]->shape;
    for (const auto& [expert, matrices] : experts) {
      const std::vector<int64_t> down = {first[1], first[0]};
      for (size_t i = 0; i < matrices.size(); ++i) {
        const std::vector<int64_t>& wanted = i == 2 ? down : first;
        if (matrices[i]->shape != wanted) refuse_shape(*matrices[i], shape_text(wanted));
      }
    }
    add_stacked(block + ".experts.gate_up_proj", experts, {0, 1});
    add_stacked(block + ".experts.down_proj", experts, {2});
  }

  void add_stacked(const std::string& name, const Experts& experts,
                   const std::vector<size_t>& matrices) {
    const auto ways = static_cast<int64_t>(matrices.size());
    const LogicalTensor& first = *experts.begin()->second[matrices.front()];
    TargetWeight weight{.name = name, .spec = &to_};
    weight.experts = static_cast<int64_t>(experts.size());
    weight.rows = first.shape[0] * ways;
    weight.cols = first.shape[1];
    weight.shape = {weight.experts, weight.cols, weight.rows};
    check_cols(first, weight.cols);
    std::vector<SourceRows> biases;
    for (const auto& [expert, of_expert] : experts) {
      for (const size_t matrix : matrices) {
        const LogicalTensor& source = *of_expert[matrix];
        weight.sources.push_back({.tensor = &source});
        const auto bias = by_name_.find(std::string(module_of(source.name)) + ".bias");
        if (bias != by_name_.end()) biases.push_back({.tensor = bias->second});
      }
    }
    weight.parts =
        stacked_parts({.experts = weight.experts, .rows = weight.rows, .cols = weight.cols},
                      name + std::string(to_.values.suffixes.front()),
                      name + std::string(to_.scales.suffixes.front()));
    add_stacked_bias(weight, std::move(biases));
    plan_.weights.push_back(std::move(weight));
  }

  void add_stacked_bias(const TargetWeight& weight, std::vector<SourceRows> biases) {
    if (biases.empty()) return;
    if (biases.size() != weight.sources.size()) {
      throw_error(ErrorKind::kCorruptData,
                  "{}: {} of the {} matrices of '{}' have a bias; all of them must, or none",
                  printable(path_), biases.size(), weight.sources.size(), printable(weight.name));
    }
    const DType dtype = biases.front().tensor->dtype;
    const std::vector<int64_t> shape = {weight.rows / weight.ways()};
    for (const SourceRows& bias : biases) {
      if (bias.tensor->convention || bias.tensor->dtype != dtype || bias.tensor->shape != shape) {
        refuse_shape(*bias.tensor,
                     fmt::format("{} {} as the others are", name(dtype), shape_text(shape)));
      }
      moved_.insert(bias.tensor);
    }
    plan_.biases.push_back(
        {.tensor = {stacked_bias_name(weight.name), dtype, {weight.experts, weight.rows}},
         .experts = weight.experts,
         .cols = weight.rows,
         .sources = std::move(biases)});
  }

  std::span<const LogicalTensor> tensors_;
  const ConventionSpec& to_;
  bool keep_formats_;
  const std::string& path_;
  bool is_mixed_ = false;  // The target has several conventions.
  std::map<std::string_view, const LogicalTensor*> by_name_;
  std::map<std::string, Experts> layers_;  // Key: block. The experts that are to be stacked.
  std::set<const LogicalTensor*> moved_;   // Biases.
  ConvertPlan plan_;
};

}  // namespace

ConvertPlan plan_conversion(std::span<const LogicalTensor> tensors, const ConventionSpec& to,
                            bool keep_formats, const std::string& path) {
  return Planner(tensors, to, keep_formats, path).run();
}

}  // namespace narrowfloat

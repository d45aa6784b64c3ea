// The file of the Python function narrowfloat.transformers.calibrate: statistics of what goes into
// matrices.
//
//   MODULE.input.*   rows that gate and up of each expert multiply, K columns
//   MODULE.inter.*   rows that its down multiplies
//     .count I64 [E]  .amax F32 [E]  .second_moment F32 [E, K]  .hessian F32 [E, K, K]
//   MODULE.linear.*  rows that a linear module multiplies: .count I64 [1]  .amax F32 [1]
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/safetensors.h"

namespace narrowfloat {

inline constexpr std::string_view kStatisticsFormat = "narrowfloat.statistics";

// The matrices of an expert that multiply one input, by the names that models give them.
struct ExpertSide {
  std::string_view name;
  std::array<std::string_view, 4> modules;  // Empty: none.
};
inline constexpr std::array kExpertSides = {
    ExpertSide{".input", {"gate_proj", "up_proj", "w1", "w3"}},
    ExpertSide{".inter", {"down_proj", "w2", "", ""}}};

// Some files have other names for experts than the models of transformers, and so the statistics,
// have: "layers.0.ffn.experts" is "model.layers.0.mlp.experts".
struct ExpertAlias {
  std::string_view in_files;      // The end of the name.
  std::string_view model_prefix;  // Models have it before the name.
};
inline constexpr std::array kExpertAliases = {
    ExpertAlias{".block_sparse_moe.experts", ""},  // Mixtral, MiniMax.
    ExpertAlias{".ffn.experts", "model."}};        // DeepSeek's own files.
inline constexpr std::string_view kModelExperts = ".mlp.experts";

// Whether the weight `tensor` is a matrix of an expert, which a file may have statistics for.
bool is_expert_matrix(std::string_view tensor);

// Names the statistics of what goes into the matrices of one expert.
struct ExpertStatistics {
  const TensorInfo* tensor = nullptr;
  int64_t expert = 0;

  bool operator==(const ExpertStatistics&) const = default;
};

class StatisticsFile {
 public:
  // `option` names the file in messages. Throws kIo, or kCorruptData for another file.
  StatisticsFile(const std::string& path, std::string_view option);

  // The Hessian of the inputs of the weight `tensor` with `cols` columns. Empty if there is none,
  // or no token came. Throws kCorruptData for one of another type or shape.
  [[nodiscard]] std::optional<ExpertStatistics> find_hessian(std::string_view tensor,
                                                             int64_t cols) const;
  // The mean squares of each column, which are also the diagonal of a Hessian.
  [[nodiscard]] std::optional<ExpertStatistics> find_second_moment(std::string_view tensor,
                                                                   int64_t cols) const;

  // Reads one row of a Hessian.
  void read_row(const ExpertStatistics& hessian, int64_t row, std::span<float> values) const;
  // Throws kCorruptData for values that are not finite or negative.
  [[nodiscard]] std::vector<float> read_second_moment(const ExpertStatistics& statistics) const;

  [[nodiscard]] const std::string& path() const { return file_.path(); }
  // A hash of names, shapes and the numbers of tokens: two files of one model differ in it.
  [[nodiscard]] std::string fingerprint() const;
  [[nodiscard]] const SafetensorsReader& file() const { return file_; }

 private:
  [[nodiscard]] std::optional<ExpertStatistics> find(std::string_view tensor, std::string_view kind,
                                                     int64_t cols, size_t rank) const;
  [[nodiscard]] int64_t count_of(const std::string& side, int64_t expert) const;
  [[noreturn]] void refuse(const TensorInfo& tensor, const std::string& what) const;

  SafetensorsReader file_;
};

}  // namespace narrowfloat

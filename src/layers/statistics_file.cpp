// See statistics_file.h.
#include "layers/statistics_file.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/throw_error.h"
#include "checkpoint/escape.h"
#include "layers/resume_manifest.h"
#include "layers/selection.h"

namespace narrowfloat {
namespace {

// An expert's matrix, taken from the name of its weight.
struct ExpertInput {
  std::string side;  // "model.layers.0.mlp.experts.input".
  int64_t expert = 0;
};

std::optional<ExpertInput> expert_input(std::string_view tensor) {
  const std::string_view module = module_of(tensor);
  const size_t before_matrix = module.rfind('.');
  if (before_matrix == std::string_view::npos) return std::nullopt;
  const std::string_view path = module.substr(0, before_matrix);
  const std::string_view matrix = module.substr(before_matrix + 1);
  const size_t before_expert = path.rfind('.');
  if (before_expert == std::string_view::npos) return std::nullopt;
  const std::string_view number = path.substr(before_expert + 1);
  ExpertInput found;
  const char* const end = number.data() + number.size();
  const auto [stopped, problem] = std::from_chars(number.data(), end, found.expert);
  if (problem != std::errc() || stopped != end || found.expert < 0 || matrix.empty()) {
    return std::nullopt;
  }
  for (const ExpertSide& side : kExpertSides) {
    if (std::find(side.modules.begin(), side.modules.end(), matrix) == side.modules.end()) continue;
    found.side = fmt::format("{}{}", path.substr(0, before_expert), side.name);
    return found;
  }
  return std::nullopt;
}

}  // namespace

bool is_expert_matrix(std::string_view tensor) { return expert_input(tensor).has_value(); }

StatisticsFile::StatisticsFile(const std::string& path, std::string_view option) : file_(path) {
  const auto format = file_.metadata().find("format");
  if (format != file_.metadata().end() && format->second == kStatisticsFormat) return;
  throw_error(ErrorKind::kCorruptData,
              "option {}: {}: expected statistics of narrowfloat.transformers.calibrate, whose "
              "metadata has the format '{}'",
              option, printable(path), kStatisticsFormat);
}

std::optional<ExpertStatistics> StatisticsFile::find_hessian(std::string_view tensor,
                                                             int64_t cols) const {
  return find(tensor, "hessian", cols, 3);
}

std::optional<ExpertStatistics> StatisticsFile::find_second_moment(std::string_view tensor,
                                                                   int64_t cols) const {
  const auto found = find(tensor, "second_moment", cols, 2);
  return found ? found : find_hessian(tensor, cols);
}

std::optional<ExpertStatistics> StatisticsFile::find(std::string_view tensor, std::string_view kind,
                                                     int64_t cols, size_t rank) const {
  std::optional<ExpertInput> matrix = expert_input(tensor);
  if (!matrix) return std::nullopt;
  const TensorInfo* found = file_.find(fmt::format("{}.{}", matrix->side, kind));
  for (const ExpertAlias& alias : kExpertAliases) {
    const size_t at = matrix->side.rfind(alias.in_files);
    if (found != nullptr || at == std::string::npos) continue;
    matrix->side.replace(at, alias.in_files.size(), kModelExperts);
    matrix->side.insert(0, alias.model_prefix);
    found = file_.find(fmt::format("{}.{}", matrix->side, kind));
  }
  if (found == nullptr) return std::nullopt;
  const bool fits = found->dtype == DType::kF32 && found->shape.size() == rank &&
                    found->shape[0] > matrix->expert && found->shape[1] == cols &&
                    found->shape.back() == cols;
  if (!fits) {
    refuse(*found, fmt::format("is {} [{}]; tensor '{}' needs F32 [experts, {}{}], with more than "
                               "{} experts",
                               name(found->dtype), fmt::join(found->shape, ", "), printable(tensor),
                               cols, rank == 3 ? fmt::format(", {}", cols) : "", matrix->expert));
  }
  if (count_of(matrix->side, matrix->expert) == 0) return std::nullopt;
  return ExpertStatistics{found, matrix->expert};
}

int64_t StatisticsFile::count_of(const std::string& side, int64_t expert) const {
  const std::string count_name = side + ".count";
  const TensorInfo* const counts = file_.find(count_name);
  if (counts == nullptr || counts->dtype != DType::kI64 || counts->shape.size() != 1 ||
      counts->shape[0] <= expert) {
    throw_error(ErrorKind::kCorruptData, "{}: expected a tensor '{}', I64 [experts]",
                printable(path()), printable(count_name));
  }
  int64_t count = 0;
  file_.read(*counts, static_cast<uint64_t>(expert) * sizeof(count),
             std::as_writable_bytes(std::span(&count, 1)));
  return count;
}

void StatisticsFile::read_row(const ExpertStatistics& hessian, int64_t row,
                              std::span<float> values) const {
  const auto cols = static_cast<uint64_t>(hessian.tensor->shape.back());
  const uint64_t before =
      (static_cast<uint64_t>(hessian.expert) * cols + static_cast<uint64_t>(row));
  file_.read(*hessian.tensor, before * cols * sizeof(float), std::as_writable_bytes(values));
}

std::vector<float> StatisticsFile::read_second_moment(const ExpertStatistics& statistics) const {
  const TensorInfo& tensor = *statistics.tensor;
  const auto cols = static_cast<uint64_t>(tensor.shape.back());
  const auto expert = static_cast<uint64_t>(statistics.expert);
  std::vector<float> moments(cols);
  if (tensor.shape.size() == 2) {
    file_.read(tensor, expert * cols * sizeof(float), std::as_writable_bytes(std::span(moments)));
  } else {
    for (uint64_t col = 0; col < cols; ++col) {
      file_.read(tensor, ((expert * cols + col) * cols + col) * sizeof(float),
                 std::as_writable_bytes(std::span(&moments[col], 1)));
    }
  }
  const bool is_good = std::all_of(moments.begin(), moments.end(),
                                   [](float one) { return std::isfinite(one) && one >= 0; });
  if (!is_good) {
    refuse(tensor, fmt::format("has means of squares that are negative or not finite, of expert {}",
                               statistics.expert));
  }
  return moments;
}

void StatisticsFile::refuse(const TensorInfo& tensor, const std::string& what) const {
  throw_error(ErrorKind::kCorruptData, "{}: tensor '{}' {}", printable(path()),
              printable(tensor.name), what);
}

std::string StatisticsFile::fingerprint() const {
  std::string text;
  for (const TensorInfo& tensor : file_.tensors()) {
    text += fmt::format("{} {}\n", tensor.name, fmt::join(tensor.shape, ","));
    if (!tensor.name.ends_with(".count") && !tensor.name.ends_with(".amax")) continue;
    std::string bytes(tensor.size_bytes, '\0');
    file_.read(tensor, 0, std::as_writable_bytes(std::span(bytes)));
    text += bytes;
  }
  return hash_of(text);
}

}  // namespace narrowfloat

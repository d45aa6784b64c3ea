// The list of findings of a check, and the identifiers of its rules (docs/checkpoints.md).
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "narrowfloat/check.h"

namespace narrowfloat {

namespace rules {
inline constexpr std::string_view kFiles = "NF-C001";
inline constexpr std::string_view kDeclaration = "NF-C002";
inline constexpr std::string_view kMissing = "NF-C003";
inline constexpr std::string_view kSurplus = "NF-C004";
inline constexpr std::string_view kNotQuantized = "NF-C005";
inline constexpr std::string_view kExperts = "NF-C006";
inline constexpr std::string_view kMerged = "NF-C007";
inline constexpr std::string_view kGlobalScale = "NF-C008";
inline constexpr std::string_view kBadScale = "NF-C009";
inline constexpr std::string_view kVanished = "NF-C010";
inline constexpr std::string_view kScaleRange = "NF-C011";
inline constexpr std::string_view kCodeRange = "NF-C012";
inline constexpr std::string_view kPadding = "NF-C013";
inline constexpr std::string_view kUneven = "NF-C014";
inline constexpr std::string_view kInputScale = "NF-C015";
inline constexpr std::string_view kNonfinite = "NF-C016";
inline constexpr std::string_view kSource = "NF-C020";
inline constexpr std::string_view kRequantized = "NF-C021";
inline constexpr std::string_view kThreshold = "NF-C022";
}  // namespace rules

class FindingList {
 public:
  void error(std::string_view id, std::string tensor, std::string message) {
    add(id, Severity::kError, std::move(tensor), std::move(message));
  }
  void warning(std::string_view id, std::string tensor, std::string message) {
    add(id, Severity::kWarning, std::move(tensor), std::move(message));
  }
  void note(std::string_view id, std::string tensor, std::string message) {
    add(id, Severity::kNote, std::move(tensor), std::move(message));
  }
  void add(std::string_view id, Severity severity, std::string tensor, std::string message) {
    findings_.push_back({std::string(id), severity, std::move(tensor), std::move(message)});
  }

  // Errors first, otherwise by tensor.
  [[nodiscard]] std::vector<Finding> sorted();

 private:
  std::vector<Finding> findings_;
};

}  // namespace narrowfloat

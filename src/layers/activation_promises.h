// Tells of each quantized module whether the config says that its activations are quantized by a
// scale, which the files must have then.
#pragma once

#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace narrowfloat {

class ActivationPromises {
 public:
  // `configs`: config.json and the model configs nested in it.
  explicit ActivationPromises(std::span<const nlohmann::json> configs);

  // Whether static activation scales of `module` are promised.
  [[nodiscard]] bool contains(std::string_view module) const;

 private:
  void add_groups(const nlohmann::json& groups);
  void add_target(const std::string& target);

  bool all_ = false;  // Every module has a promise.
  std::set<std::string, std::less<>> modules_;
  std::vector<std::string> globs_;
};

}  // namespace narrowfloat

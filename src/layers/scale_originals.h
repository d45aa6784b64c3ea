// The exact bits of global scales that a conversion had to invert.
//
// ModelOpt stores the decode scale of an NVFP4 tensor and compressed-tensors its reciprocal. For
// 17 % of all fp32 values x no fp32 value y has 1 / y = x, so the way back cannot find x again. A
// conversion therefore writes x beside its rounded reciprocal: into narrowfloat-scales.json of a
// directory, or into the metadata of a single file. The conversion back uses it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "narrowfloat/checkpoint.h"

namespace narrowfloat {

inline constexpr const char* kScalesFileName = "narrowfloat-scales.json";
inline constexpr const char* kScalesKey = "narrowfloat.scales";  // In the metadata of a file.

class ScaleOriginals {
 public:
  // Reads those that a conversion left beside `checkpoint`. Throws kCorruptData for other content.
  static ScaleOriginals read(const Checkpoint& checkpoint);

  // Remembers that `stored`, the reciprocal, was `value` under the name `original`.
  void add(const std::string& stored, const std::string& original, float value);
  // Returns the value under the name `original` of the scale `name`, if it is known and its
  // reciprocal is `stored`.
  [[nodiscard]] std::optional<float> find(std::string_view name, std::string_view original,
                                          float stored) const;
  [[nodiscard]] bool is_empty() const { return scales_.empty(); }
  [[nodiscard]] std::string to_json() const;

 private:
  struct Entry {
    std::string original;
    uint32_t bits = 0;
  };
  std::map<std::string, Entry, std::less<>> scales_;
};

}  // namespace narrowfloat

// The entries of a MoeTuning that match one layer.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "narrowfloat/moe_tuning.h"

namespace narrowfloat {

class TunedTiles {
 public:
  TunedTiles(const MoeTuning& tuning, const MoeTuningKey& key);

  [[nodiscard]] std::optional<int32_t> find(int64_t tokens) const;
  // Tiles change at the ends of ranges and between them follow the rule, which never decreases. Of
  // all numbers of tokens up to this one, these may need the most rows.
  [[nodiscard]] std::vector<int64_t> largest_up_to(int64_t tokens) const;

 private:
  struct Range {
    int64_t first;
    int64_t last;
    int32_t token_tile;
  };
  std::vector<Range> ranges_;
};

}  // namespace narrowfloat

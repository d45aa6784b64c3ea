// See tuned_tiles.h.
#include "layers/moe/tuned_tiles.h"

namespace narrowfloat {

TunedTiles::TunedTiles(const MoeTuning& tuning, const MoeTuningKey& key) {
  for (const MoeTuningEntry& entry : tuning.entries()) {
    if (entry.key != key) continue;
    ranges_.push_back({entry.first_tokens, entry.last_tokens, entry.token_tile});
  }
}

std::optional<int32_t> TunedTiles::find(int64_t tokens) const {
  for (const Range& range : ranges_) {
    if (tokens >= range.first && tokens <= range.last) return range.token_tile;
  }
  return std::nullopt;
}

std::vector<int64_t> TunedTiles::largest_up_to(int64_t tokens) const {
  std::vector<int64_t> largest{tokens};
  for (const Range& range : ranges_) {
    if (range.last < tokens) largest.push_back(range.last);
    if (range.first - 1 < tokens) largest.push_back(range.first - 1);
  }
  return largest;
}

}  // namespace narrowfloat

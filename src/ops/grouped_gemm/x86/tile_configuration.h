// The operand of ldtilecfg, which gives matrix tiles their extents.
#pragma once

#include <cstdint>

namespace narrowfloat {

struct TileConfiguration {
  uint8_t palette;  // 1
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfiguration) == 64);

}  // namespace narrowfloat

// The table of rcp_approx.h.
#pragma once

#include <cstdint>

// Packed differences, entry m in bits 2(m % 4) of byte m / 4: 0, 1 for +1, 2 for -1.
extern "C" const uint8_t narrowfloat_rcp_delta_table[];

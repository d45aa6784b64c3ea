// Codes of E2M1, E4M3 and BF16 elements and their values, from the definitions of the formats: what
// the library's own encoders and decoders are compared with.
#pragma once

#include <cstdint>

namespace narrowfloat::testing {

double decode_e2m1(unsigned code);
double decode_e4m3(unsigned code);
// The nearest E4M3 value, ties to the even code.
double nearest_e4m3(double value);
double bf16_value(uint16_t code);

// The codes of values that the types have.
uint16_t bf16_of_exact(double value);
uint8_t e4m3_of_exact(double value);

}  // namespace narrowfloat::testing

// Whether the registers that warpgroups exchange (give_registers(), take_registers()) suffice. A
// warpgroup that asks for more than its CTA began with waits for ever.
#pragma once

namespace narrowfloat {

// The first 128 of a CTA's threads keep `producer` registers each, all others take `consumer`.
// `ctas_per_sm` CTAs fit an SM and share its 65536 registers at the launch.
constexpr bool fits_registers(int threads, int ctas_per_sm, int producer, int consumer) {
  const int at_launch = 65536 / ctas_per_sm / threads / 8 * 8;  // Registers of a thread.
  return 128 * producer + (threads - 128) * consumer <= threads * at_launch;
}

}  // namespace narrowfloat

// Whether warpgroups that hand registers to each other (give_registers(), take_registers()) get
// what they ask for: one that asks for more than its block began with waits for ever.
#pragma once

namespace narrowfloat {

// Threads of a block, of which the first 128 keep `producer` registers each and all others take
// `consumer`; so many blocks fit a multiprocessor, whose 65536 registers they begin with.
constexpr bool fits_registers(int threads, int blocks_per_sm, int producer, int consumer) {
  const int at_launch = 65536 / blocks_per_sm / threads / 8 * 8;  // Of a thread.
  return 128 * producer + (threads - 128) * consumer <= threads * at_launch;
}

}  // namespace narrowfloat

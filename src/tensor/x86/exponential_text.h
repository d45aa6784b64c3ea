// exp_portable() of base/portable_math.h in vectors: text that sources for a level of vector
// instructions compile (docs/architecture.md, levels of vector instructions).
#pragma once

namespace narrowfloat::exponential_text {

// A lane does the operations of exp_portable() in their order, so it has their bits; only a NaN may
// be another one. Level has vectors of fp32 (Floats) and elementary operations; is_greater() and
// is_less() are false for NaN.
template <class Level>
typename Level::Floats exponential(typename Level::Floats x) {
  using Floats = typename Level::Floats;
  const auto constant = [](float value) { return Level::floats(value); };
  const Floats round = constant(0x1.8p23F);
  const Floats scaled = Level::mul(x, constant(0x1.715476p+0F));
  const Floats n = Level::sub(Level::add(scaled, round), round);
  Floats r = Level::fma(n, constant(-0x1.62e400p-1F), x);
  r = Level::fma(n, constant(-0x1.7f7d1cp-20F), r);
  Floats p = constant(1.0F / 5040.0F);
  p = Level::fma(p, r, constant(1.0F / 720.0F));
  p = Level::fma(p, r, constant(1.0F / 120.0F));
  p = Level::fma(p, r, constant(1.0F / 24.0F));
  p = Level::fma(p, r, constant(1.0F / 6.0F));
  p = Level::fma(p, r, constant(0.5F));
  p = Level::fma(p, r, constant(1.0F));
  p = Level::fma(p, r, constant(1.0F));
  const auto exponent = Level::to_ints(n);
  const auto half = Level::halved(exponent);
  const Floats power = Level::mul(Level::mul(p, Level::power_of_two(half)),
                                  Level::power_of_two(Level::sub(exponent, half)));
  const Floats below = Level::select(Level::is_less(x, constant(-104.0F)), constant(0.0F), power);
  const Floats above =
      Level::select(Level::is_greater(x, constant(89.0F)), constant(__builtin_inff()), below);
  return Level::select(Level::is_nan(x), x, above);
}

}  // namespace narrowfloat::exponential_text

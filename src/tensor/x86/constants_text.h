// Vectors of constants in memory, made by a rule: text that sources for a level of vector
// instructions compile (docs/architecture.md, levels of vector instructions).
#pragma once

namespace narrowfloat {

// The numbers of 64 bytes.
template <typename Number>
struct alignas(64) Constants {
  Number numbers[64 / sizeof(Number)];
};

// The number at each index is rule(index).
template <typename Number, typename Rule>
consteval Constants<Number> made_by(Rule rule) {
  Constants<Number> vector{};
  int index = 0;
  for (Number& number : vector.numbers) number = static_cast<Number>(rule(index++));
  return vector;
}

// Operations of vpternlogd: (first & second) | third; first | (second & third);
// third ? second : first.
inline constexpr int kAndOr = 0xEA;
inline constexpr int kOrMasked = 0xF8;
inline constexpr int kSelectSecond = 0xD8;

}  // namespace narrowfloat

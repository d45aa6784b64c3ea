// A name that is not known is answered with the nearest one, by Levenshtein's distance.
#include "cli_common/allreduce_names.h"

#include <algorithm>
#include <numeric>
#include <string>

#include <fmt/format.h>

#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

// The enumerators from 0 to `last`.
template <typename Value>
std::vector<Value> values_to(Value last) {
  std::vector<Value> values;
  values.reserve(static_cast<size_t>(last) + 1);
  for (int i = 0; i <= static_cast<int>(last); ++i) values.push_back(static_cast<Value>(i));
  return values;
}

template <typename Value>
std::vector<std::string_view> names_of(const std::vector<Value>& values) {
  std::vector<std::string_view> names;
  names.reserve(values.size());
  for (const Value value : values) names.push_back(name(value));
  return names;
}

// Insertions, deletions and replacements that make one word the other.
size_t edit_distance(std::string_view from, std::string_view to) {
  std::vector<size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (const char letter : from) {
    size_t diagonal = row[0]++;
    for (size_t j = 0; j < to.size(); ++j) {
      const size_t replaced = diagonal + (letter == to[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

template <typename Value>
Value named(std::string_view word, const std::vector<Value>& values, std::string_view what) {
  const std::vector<std::string_view> names = names_of(values);
  const auto known = std::ranges::find(names, word);
  if (known != names.end()) return values[static_cast<size_t>(known - names.begin())];
  const auto nearest = std::ranges::min_element(
      names, {}, [&](std::string_view one) { return edit_distance(word, one); });
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("'{}' is no {}, did you mean {}? There are {}", word, what, *nearest,
                          fmt::join(names, ", ")));
}

}  // namespace

std::vector<AllReducePattern> all_allreduce_patterns() {
  return values_to(static_cast<AllReducePattern>(kNumAllReducePatterns - 1));
}

std::string_view allreduce_pattern_list() {
  static const std::string kList =
      fmt::format("{}", fmt::join(names_of(all_allreduce_patterns()), ", "));
  return kList;
}

AllReducePattern parse_allreduce_pattern(std::string_view text) {
  return named(text, all_allreduce_patterns(), "pattern");
}

AllReduceAlgorithm parse_allreduce_algorithm(std::string_view text) {
  return named(text, values_to(AllReduceAlgorithm::kReference), "algorithm");
}

AllReduceQuantization parse_allreduce_quantization(std::string_view text) {
  return named(text, values_to(AllReduceQuantization::kMxfp4), "quantization");
}

}  // namespace narrowfloat::cli

// Names of enumerators from a table of records with `id` and `name`, in the order of the enum.
#pragma once

#include <string_view>
#include <vector>

#include <fmt/ranges.h>

#include "base/bad_enumerator.h"
#include "base/throw_error.h"

namespace narrowfloat {

// The record of `id`.
template <typename Table, typename Enum>
const auto& record_of(const Table& table, Enum id, const char* what) {
  const auto index = static_cast<size_t>(id);
  if (index >= std::size(table)) throw_bad_enumerator(what, static_cast<int>(id));
  return table[index];
}

// The enumerator called `text`. Throws kInvalidArgument that lists the accepted names.
template <typename Table>
auto parse_name(const Table& table, std::string_view text, std::string_view what) {
  std::vector<std::string_view> names;
  for (const auto& record : table) {
    if (record.name == text) return record.id;
    names.push_back(record.name);
  }
  throw_invalid("{}: expected one of {}, got \"{}\"", what, fmt::join(names, ", "), text);
}

}  // namespace narrowfloat

// Phases of a collective operation: work that each rank does alone, after which every rank knows
// whether it succeeded on all of them.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "narrowfloat/bootstrap.h"

namespace narrowfloat {

// A phase failed on at least one rank. All ranks throw it with the same message, so all of them may
// go on with another attempt. An error of the bootstrap itself is no PhaseError.
class PhaseError : public Error {
 public:
  using Error::Error;
};

// `work` must not use the bootstrap: a rank that fails leaves it early.
void run_phase(Bootstrap& bootstrap, const std::string& name, const std::function<void()>& work);

// The values of all ranks.
template <typename Value>
std::vector<Value> gather_values(Bootstrap& bootstrap, const Value& mine) {
  static_assert(std::is_trivially_copyable_v<Value>);
  std::vector<Value> all(static_cast<size_t>(bootstrap.size()));
  bootstrap.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  return all;
}

}  // namespace narrowfloat

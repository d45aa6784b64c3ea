// See phase.h.
#include "runtime/comm/phase.h"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/assert.h"

namespace narrowfloat {

void run_phase(Bootstrap& bootstrap, const std::string& name, const std::function<void()>& work) {
  std::optional<Error> error;
  try {
    work();
  } catch (const Error& thrown) {
    error = thrown;
  } catch (const std::exception& thrown) {
    error.emplace(ErrorKind::kDevice, thrown.what());
  }
  const std::vector<uint8_t> has_failed =
      gather_values(bootstrap, static_cast<uint8_t>(error.has_value()));
  const bool any_has_failed = std::ranges::count(has_failed, 0) != bootstrap.size();
  try {
    if (any_has_failed) bootstrap.agree(name, error ? &*error : nullptr);
  } catch (const Error& merged) {
    throw PhaseError(merged.kind(), merged.what());
  }
  NF_ASSERT(!any_has_failed);
}

}  // namespace narrowfloat

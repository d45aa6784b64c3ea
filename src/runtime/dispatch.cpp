// The parts of dispatch that need no template: the environment variable and the two errors.
#include "runtime/dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include <fmt/ranges.h>

#include "base/throw_error.h"

namespace narrowfloat {

std::string forced_implementation(std::string_view op) {
  const char* setting = std::getenv("NARROWFLOAT_FORCE");
  if (setting == nullptr) return {};
  std::string_view rest = setting;
  std::string forced;
  while (!rest.empty()) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), entry.size() + 1));
    const size_t colon = entry.find(':');
    if (colon == std::string_view::npos || colon == 0 || colon + 1 == entry.size()) {
      throw_invalid(
          "NARROWFLOAT_FORCE: expected op:implementation[,op:implementation...], got \"{}\"",
          setting);
    }
    if (std::find(kOperations.begin(), kOperations.end(), entry.substr(0, colon)) ==
        kOperations.end()) {
      throw_invalid("NARROWFLOAT_FORCE: there is no operation \"{}\"; expected one of {}",
                    entry.substr(0, colon), fmt::join(kOperations, ", "));
    }
    if (entry.substr(0, colon) == op) forced = entry.substr(colon + 1);
  }
  return forced;
}

namespace dispatch_detail {

void check_forced_name(const Explanation& explanation, std::string_view forced) {
  if (forced.empty()) return;
  std::vector<std::string_view> names;
  for (const Candidate& candidate : explanation.candidates) {
    if (candidate.name == forced) return;
    names.push_back(candidate.name);
  }
  throw_invalid("NARROWFLOAT_FORCE: {} has no implementation \"{}\"; it has {}", explanation.op,
                forced, fmt::join(names, ", "));
}

void throw_none_fits(const Explanation& explanation) {
  std::string reasons;
  for (const Candidate& candidate : explanation.candidates) {
    reasons += fmt::format("\n  {}: {}", candidate.name, candidate.reason);
  }
  throw_error(ErrorKind::kUnsupported, "{}: no implementation takes {}{}", explanation.op,
              explanation.problem, reasons);
}

}  // namespace dispatch_detail
}  // namespace narrowfloat

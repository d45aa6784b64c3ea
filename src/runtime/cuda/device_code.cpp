// See device_code.h.
#include "runtime/cuda/device_code.h"

#include <algorithm>
#include <charconv>

namespace narrowfloat {
namespace {

constexpr std::string_view kPtxPrefix = "compute_";

struct Choice {
  DeviceCode code;
  int rank = 0;  // 0: does not run there; otherwise the driver takes the highest.
};

Choice choice_of(std::string_view architecture, int major, int minor, bool forces_ptx) {
  constexpr int kMachineCode = 1000;  // Above every version.
  const bool is_ptx = architecture.starts_with(kPtxPrefix);
  const std::string_view number = is_ptx ? architecture.substr(kPtxPrefix.size()) : architecture;
  int version = 0;
  const char* const end = number.data() + number.size();
  const bool is_own = std::from_chars(number.data(), end, version).ptr != end;
  const int capability = 10 * major + minor;
  if (is_ptx) {
    if (version > capability) return {};
    return {{DeviceCodeKind::kPortable, architecture}, version};
  }
  if (forces_ptx) return {};
  if (is_own) {
    if (version != capability) return {};
    return {{DeviceCodeKind::kOwn, architecture}, 2 * kMachineCode};
  }
  if (version / 10 != major || version > capability) return {};
  return {{DeviceCodeKind::kPortable, architecture}, kMachineCode + version};
}

}  // namespace

DeviceCode find_device_code(std::string_view architectures, int major, int minor, bool forces_ptx) {
  Choice best;
  while (!architectures.empty()) {
    const std::string_view architecture = architectures.substr(0, architectures.find(','));
    const Choice choice = choice_of(architecture, major, minor, forces_ptx);
    if (choice.rank > best.rank) best = choice;
    architectures.remove_prefix(std::min(architectures.size(), architecture.size() + 1));
  }
  return best.code;
}

}  // namespace narrowfloat

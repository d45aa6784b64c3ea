// Which of a build's code a GPU runs (decision 0039). It needs no CUDA.
#pragma once

#include <string_view>

namespace narrowfloat {

enum class DeviceCodeKind : int {
  kNone = 0,
  kOwn = 1,       // For exactly this architecture, with its own instructions.
  kPortable = 2,  // For compute capability 8.0 and everything above.
};

struct DeviceCode {
  DeviceCodeKind kind = DeviceCodeKind::kNone;
  std::string_view architecture;  // The entry of the list; empty: none.
};

// `architectures`: names with commas. "90a" is code for exactly this compute capability, "86"
// portable machine code, which higher minor versions run, too, and "compute_80" portable PTX, which
// the driver compiles for any later GPU. The driver takes machine code before PTX, unless
// `forces_ptx`, and the newest of each kind.
DeviceCode find_device_code(std::string_view architectures, int major, int minor, bool forces_ptx);

// Those that this build has code for, as find_device_code takes them; empty without CUDA.
std::string_view compiled_architectures();

}  // namespace narrowfloat

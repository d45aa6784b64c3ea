// See machine_json.h.
#include "cli/bench/machine_json.h"

namespace narrowfloat::cli {

Json machine_json(const MachineFacts& facts, Device device) {
  return Json{{"device", to_string(device)},
              {"name", facts.name},
              {"compute_capability", facts.compute_capability},
              {"driver", facts.driver},
              {"cuda_runtime", facts.cuda_runtime},
              {"units", facts.num_units},
              {"max_clock_mhz", facts.max_clock_mhz},
              {"cache_bytes", facts.cache_bytes},
              {"memory_bytes", facts.memory_bytes}};
}

Json rates_json(const MachineRates& rates) {
  return Json{{"copy_gb_per_s", rates.copy_gb_per_s},
              {"kernel_copy_gb_per_s", rates.kernel_copy_gb_per_s},
              {"own_copy_gb_per_s", rates.own_copy_gb_per_s},
              {"read_gb_per_s", rates.read_gb_per_s},
              {"read_2_write_1_gb_per_s", rates.mixed_gb_per_s}};
}

}  // namespace narrowfloat::cli

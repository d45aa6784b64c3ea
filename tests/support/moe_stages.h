// Stage by stage comparison of layers (moe spec 12.2): G1 the first GEMM, G2 the codes of the
// intermediate, G3 the second GEMM and the combine on the compared run's own intermediate, G4 end
// to end. The reference is the CPU's fp64.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "support/moe_case.h"

namespace narrowfloat::testing {

// The memory of a run's tensors.
class StagePlace {
 public:
  virtual ~StagePlace() = default;
  [[nodiscard]] virtual Device device() const = 0;
  [[nodiscard]] virtual Stream stream() const = 0;
  // Host tensors there; views of host memory are left as they are on the CPU.
  virtual TensorView moved(const TensorView& host) = 0;
  virtual ScaleView moved(const ScaleView& host) = 0;
  // Poisoned memory, aligned to 256 bytes; lives as long as the place.
  virtual uint8_t* memory(int64_t bytes) = 0;
  // After the stream's work.
  [[nodiscard]] virtual std::vector<uint8_t> read(const uint8_t* memory, int64_t bytes) const = 0;
};

class HostPlace : public StagePlace {
 public:
  [[nodiscard]] Device device() const override { return {}; }
  [[nodiscard]] Stream stream() const override { return {}; }
  TensorView moved(const TensorView& host) override { return host; }
  ScaleView moved(const ScaleView& host) override { return host; }
  uint8_t* memory(int64_t bytes) override;
  [[nodiscard]] std::vector<uint8_t> read(const uint8_t* memory, int64_t bytes) const override;

 private:
  std::vector<std::vector<uint8_t>> buffers_;
};

// Bounds of moe spec 12.3 for the way a device computes a mode.
struct StageBounds {
  double fc1 = 0;       // G1, relative.
  double codes = 0;     // G2: share of codes that differ, by one step each.
  double scales = 0;    // G2: relative, of fp32 scales. Byte scales: one step.
  Distance second;      // G3
  Distance end_to_end;  // G4
};
StageBounds stage_bounds(MoeMode mode);

// Runs the case there with fp32 sums, and its reference. compares_fc1: the activation is not fused
// into the first GEMM.
void expect_stages_close(MoeCase& layer_case, StagePlace& place, bool compares_fc1);

}  // namespace narrowfloat::testing

// A call of activate() on permuted rows as a layer makes it, run on the CPU and on a GPU, and how
// far the two results may lie apart.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "narrowfloat/activation.h"
#include "support/permuted.h"
#include "support/rows_tensor.h"

namespace narrowfloat::testing {

enum class ActivationData {
  kPlain,     // Gates of N(0, 2), scales of 0.005 to 0.03.
  kSpecials,  // Some NaN, infinities, zeros of both signs, whole groups of zeros.
};

struct ActivationShape {
  DType input = DType::kF8E4M3;  // Or BF16, or F32.
  int64_t tokens = 1;
  int64_t inter = 2048;
  GateOrder gate_order = GateOrder::kUpGate;
  bool has_num_rows = true;  // Else scales are [rows, blocks].
  bool has_inverse_map = false;
  ActivationData data = ActivationData::kPlain;
};
std::string to_string(const ActivationShape& shape);

// Eight slots a token, 48 of 64 experts local, tiles of 8 rows.
struct ActivationCase {
  ActivationShape shape;
  Permuted maps;
  RowsTensor coded;      // E4M3 input.
  GuardedBuffer values;  // BF16 or F32 input.
  ActivateArgs args;     // Without output.

  explicit ActivationCase(const ActivationShape& of);
  [[nodiscard]] int64_t rows() const { return maps.layout.max_rows; }
};

struct GpuRun {
  bool programmatic_launch = false;
  int replays = 0;  // Captured into a graph that is replayed so often; 0: plain calls.
};

// The output's buffers start out as the poison byte.
inline constexpr uint8_t kOutputPoison = 0xA5;
RowsTensor activated_on_cpu(const ActivationCase& c);
// alpha: the memory of values per expert, if there are any.
RowsTensor activated_on_gpu(const ActivationCase& c, const GpuRun& run = {},
                            const GuardedBuffer& alpha = {});

struct ActivationDifference {
  int64_t codes = 0;           // Codes of rows that a slot names.
  int64_t differing = 0;       // Codes that differ by one step.
  int64_t far = 0;             // Codes that differ by more.
  int64_t touched = 0;         // Bytes that only one side wrote.
  double worst_scale = 0.0;    // Relative.
  int64_t strange_scales = 0;  // Not finite.
};
ActivationDifference difference(const ActivationCase& c, const RowsTensor& expected,
                                const RowsTensor& actual);

}  // namespace narrowfloat::testing

// The activation between the two GEMMs of an expert, and the requantization of its result (moe spec
// 1.4, 6.2, 6.4, 6.7).
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "narrowfloat/export.h"
#include "narrowfloat/moe_types.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

enum class ActivationKind : int {
  kIdentity = 0,  // Not gated: F1 = I.
  kRelu = 1,
  kRelu2 = 2,
  kSilu = 3,
  kGeluErf = 4,
  kGeluTanh = 5,
  kSwiglu = 6,  // Gated: F1 = 2 * I.
  kSwigluStep = 7,
  kGegluErf = 8,
  kGegluTanh = 9,
  kSituGlu = 10,
};

struct ActivationInfo {
  ActivationKind id;
  std::string_view name;     // "swiglu_step"
  std::string_view formula;  // One line, in u and g.
  bool is_gated;
  // Parameters it reads; the others must keep their defaults.
  bool has_alpha, has_beta, has_limits;
};
NARROWFLOAT_API std::span<const ActivationInfo> all_activations();
NARROWFLOAT_API const ActivationInfo& activation_info(ActivationKind kind);
NARROWFLOAT_API std::string_view name(ActivationKind kind);
NARROWFLOAT_API ActivationKind parse_activation(std::string_view text);

// Every field is explicit; the factories only spell common choices.
struct Activation {
  static constexpr float kNoLimit = std::numeric_limits<float>::infinity();

  ActivationKind kind = ActivationKind::kSwiglu;
  PerExpert alpha = 1.0F;  // kSwiglu: slope inside the sigmoid. kSituGlu: tanh scale of the gate.
  PerExpert beta = 0.0F;   // kSwiglu: added to u after the clamp. kSituGlu: tanh scale of u.
  PerExpert limit_gate = kNoLimit;  // In units of g and u.
  PerExpert limit_up = kNoLimit;

  static Activation swiglu() { return {}; }
  // gpt-oss: 1.702, 1, 7.
  NARROWFLOAT_API static Activation swiglu_oai(float alpha, float beta, float limit);
  NARROWFLOAT_API static Activation swiglu_step(float limit);
  NARROWFLOAT_API static Activation situ(float gate_scale, float up_scale);
  // A kind without parameters.
  NARROWFLOAT_API static Activation plain(ActivationKind kind);
};

// Throws kInvalidArgument for parameters that the kind does not read, and for values without a
// meaning: limits below 0, tanh scales of kSituGlu that are not above 0, NaN. Values per expert are
// not checked.
NARROWFLOAT_API void check_activation(const Activation& activation);

struct ActivateArgs {
  // u and g of the rows: F32, F64 or BF16 [rows, F1], or F8_E4M3 with F32 1x128 scales. F64 is
  // computed in fp64 throughout and rounded once by the requantization; all else in fp32.
  CodedRows input;
  Activation activation;
  GateOrder gate_order = GateOrder::kUpGate;  // Counts for gated activations.
  // I32 [slots]: the rows to compute, none of them twice, -1 for none. Other rows are neither read
  // nor written, scales included.
  TensorView slot_to_row;
  // The experts of the tiles of rows: read only where a parameter has a value per expert.
  TensorView tile_to_expert;
  int32_t token_tile = 0;
  RowFormat format = RowFormat::kBf16;  // Output format.
  PerExpert multiplier = 1.0F;          // kFp8Static and kNvfp4: static quant multiplier.
  CodedRows output;                     // [rows, I]
  // Optional I32 [1]: the P of 1x128 scales of input and output that are [blocks, P] with a P known
  // on the device only. The strides of both scale views are then not read.
  TensorView num_rows;
  // Optional I32 [rows], the inverse of slot_to_row: the slot of a row, negative for rows that no
  // slot names (Permutation::row_to_slot). It does not change results. With it a kernel may visit
  // rows in memory order, which is faster for many rows on a GPU: the 1x128 scales of neighbouring
  // rows are adjacent.
  TensorView row_to_slot;
};

// h = activation(u, g), requantized to `format` with the quantizers' bits in exact mode (kFp8Group:
// rule reciprocal; kNvfp4PerToken, kFp8Token: h is rounded to bf16). Throws before it writes.
NARROWFLOAT_API void activate(const ActivateArgs& args, Stream stream = {});

}  // namespace narrowfloat

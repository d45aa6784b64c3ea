// Grouped GEMM: for each expert e, rows of activations times the expert's weights (moe spec 6.1,
// 6.4). As in any GEMM m counts rows of activations, n rows of weights (output features) and k is
// summed over. Weights are packed once, in the layout that the implementation computes from. The
// epilogue may apply the activation where the weights are those of u and g.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "narrowfloat/activation.h"
#include "narrowfloat/export.h"
#include "narrowfloat/moe_types.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

struct PackedWeights;  // The library's own.

// Weights in checkpoint order: row-major, no shuffle.
struct WeightView {
  // [experts, rows, cols], dense: BF16, F8_E4M3, or U8 [experts, rows, cols / 2] for E2M1.
  TensorView values;
  // Absent for kBf16 and kFp8Tensor, else the scales of each expert (batch): linear, or
  // swizzled_128x4 for the byte scales. kFp8Block: rows and blocks are those of the 128x128 grid.
  ScaleView scales;
};

// Returns the weights of one expert, [1, rows, cols]. The returned view is valid until the next
// call or until prepare() returns: the memory may be the same every time, or be freed then.
using ExpertSource = std::function<WeightView(int64_t expert)>;

// Immutable, cheap to copy; may be used by several threads at once. A default-constructed one is
// empty: whatever reads it throws kInvalidArgument.
class NARROWFLOAT_API GroupedWeights {
 public:
  GroupedWeights() = default;

  // Packs `weights` into the layout of the implementation for `mode`. The packed weights have as
  // many bytes; on a GPU up to 4 % more, with rows and columns padded to 64 or 128. On a GPU their
  // values start at a multiple of 16 bytes, as do `a.values` and the output below, and the call
  // waits for the copy.
  // gate_order: the rows are those of u and g, as in a gated layer's first weights, and an
  // implementation may interleave them for an activation in the epilogue (fuses_activation).
  // Throws kInvalidArgument for shapes, types or scales that do not fit the mode.
  static GroupedWeights prepare(const WeightView& weights, MoeMode mode, Device device = {},
                                Stream stream = {}, std::optional<GateOrder> gate_order = {});

  // Packs weights that need not exist together: calls `source` for experts 0 to experts - 1, in
  // this order, and holds the packed weights and one expert.
  static GroupedWeights prepare(const ExpertSource& source, int64_t experts, MoeMode mode,
                                Device device = {}, Stream stream = {},
                                std::optional<GateOrder> gate_order = {});

  [[nodiscard]] MoeMode mode() const;
  [[nodiscard]] int64_t experts() const;
  [[nodiscard]] int64_t rows() const;
  [[nodiscard]] int64_t cols() const;
  [[nodiscard]] int64_t bytes() const;  // Packed weights.
  [[nodiscard]] Device device() const;
  [[nodiscard]] std::string_view implementation() const;  // "cpu_baseline"
  // Whether grouped_gemm takes GroupedGemmArgs::activation of this kind and row format, with token
  // tiles of this size. False where prepare() was given no gate order.
  [[nodiscard]] bool fuses_activation(ActivationKind kind, RowFormat format,
                                      int32_t token_tile) const;

 private:
  explicit GroupedWeights(std::shared_ptr<const PackedWeights> packed)
      : packed_(std::move(packed)) {}
  friend const PackedWeights& packed_weights(const GroupedWeights& weights);
  std::shared_ptr<const PackedWeights> packed_;
};

// An activation and its requantization in the epilogue, as activate() does them
// (narrowfloat/activation.h), on the final sums, which are not stored. The call throws kUnsupported
// where GroupedWeights::fuses_activation is false, and kInvalidArgument where
// GroupedGemmArgs::gate_order differs from the one of prepare().
struct GemmActivation {
  Activation activation;
  RowFormat format = RowFormat::kBf16;
  PerExpert multiplier = 1.0F;  // kFp8Static and kNvfp4.
  CodedRows output;             // [max rows, weight rows / 2]. Padding rows are not written.
};

struct GroupedGemmArgs {
  // Rows in the mode's format (for kBf16 rows F32 as well, CPU only): [T, cols] with
  // gather_tokens, else [rows, cols].
  CodedRows a;
  bool gather_tokens = false;  // Row p reads row row_to_token[p] of `a` instead of row p.
  Permutation permutation;
  Accumulation accumulation = Accumulation::kFp32;

  // output[p, n] = scale * a.row_scale * (w * sum) + bias, for the expert of p's tile. Absent
  // factors are 1, an absent bias is 0. w is slot_weights[row_to_slot[p]].
  TensorView slot_weights;  // F32 [slots], optional.
  PerExpert scale = 1.0F;
  // If set, weight rows of the gate half (by this order) take gate_scale instead of scale.
  std::optional<GateOrder> gate_order;
  PerExpert gate_scale = 1.0F;
  TensorView bias;  // Optional: F32 or BF16 [experts, weight rows].

  // [max rows, weight rows]: F32, BF16 (rounded once), or F64 with Accumulation::kFp64. Padding
  // rows are not written. Absent with an activation.
  TensorView output;
  // Allowed where GroupedWeights::fuses_activation is true. The exponential and the reciprocal of
  // the sigmoid may be the hardware's approximations (moe spec 6.2).
  std::optional<GemmActivation> activation;
};

// Bytes of workspace for up to `a_rows` rows of `a`; never decreases as a_rows grows.
// docs/kernels/cpu_grouped_gemm.md and grouped_gemm_sm90.md have the formulas.
NARROWFLOAT_API int64_t grouped_gemm_workspace(const GroupedWeights& weights, int64_t a_rows,
                                               Accumulation accumulation);

// Multiplies the valid rows of every token tile. workspace: U8, aligned to 256 bytes, any contents.
NARROWFLOAT_API void grouped_gemm(const GroupedGemmArgs& args, const GroupedWeights& weights,
                                  const TensorView& workspace, Stream stream = {});

}  // namespace narrowfloat

// The Row of the all-reduce protocols on the CPU: where a rank's addends come from, and the
// epilogue of a token in plain scalar code (docs/allreduce.md, Exactness). A row belongs to one
// CTA, which is a thread.
#pragma once

#include <vector>

#include "comm/allreduce_args.h"
#include "comm/elements.h"
#include "comm/protocol.h"
#include "formats/rms_norm.h"

namespace narrowfloat {

// Quantizes the norm of a token, `hidden` numbers that are rounded to the element type, and stores
// codes and scales. Writes the padding of the token's scales, and after the last token the rows
// that pad the tensor.
void store_quantized_row(const EpilogueArgs& args, int64_t token, const float* norm);

template <class Elements, class Cta>
class CpuRow {
 public:
  using LeafType = typename Elements::LeafType;

  CpuRow(const RankArgs& args, Cta& cta)
      : args_(args),
        epilogue_(args.epilogue),
        cta_(cta),
        leaves_(args.epilogue.hidden / kLeafElements),
        row_(args.epilogue.has_norm ? static_cast<size_t>(args.epilogue.hidden) : 0U) {}

  [[nodiscard]] bool stores_local_value() const {
    return args_.source.kind != AllReduceSource::kInput;
  }

  [[nodiscard]] LeafType local_value(int64_t token, int64_t leaf) const {
    const SourceArgs& source = args_.source;
    switch (source.kind) {
      case AllReduceSource::kMoeReduction:
        return moe_reduction_value<Elements>(source.reduction, args_.accumulation, epilogue_.tokens,
                                             token, leaves_, leaf);
      case AllReduceSource::kMoeFinalize:
        return moe_finalize_value<Elements>(source.finalize, args_.accumulation, token, leaves_,
                                            leaf, [&](int32_t row) { report_row(token, row); });
      case AllReduceSource::kInput:
        break;
    }
    return Elements::load(source.input, token * leaves_ + leaf);
  }

  void prepare(int64_t /*token*/, int64_t /*leaf*/, bool /*is_inside*/) const {}
  // finish() of the last token writes it.
  void clear_padding() const {}

  // Leaves of a token arrive in their order.
  void accept(int64_t token, int64_t leaf, bool /*is_inside*/, const LeafType& sum) {
    const int64_t index = token * leaves_ + leaf;
    if (epilogue_.ar_out != nullptr) store(epilogue_.ar_out, index, sum);
    if (!epilogue_.has_norm) return;
    float x[kLeafElements];
    float residual[kLeafElements];
    Elements::widen(sum, x);
    Elements::widen(Elements::load(epilogue_.residual_in, index), residual);
    for (int i = 0; i < kLeafElements; ++i) x[i] = add_rn(x[i], residual[i]);
    const LeafType rounded = Elements::narrow(x);
    if (epilogue_.residual_out != nullptr) store(epilogue_.residual_out, index, rounded);
    Elements::widen(rounded, x);
    squares_.add(x);
    std::memcpy(&row_[static_cast<size_t>(leaf * kLeafElements)], x, sizeof(x));
  }

  void finish(int64_t token) {
    if (!epilogue_.has_norm) return;
    const float factor = reciprocal_rms_of_sum(squares_.total(), epilogue_.hidden, epilogue_.eps);
    squares_ = {};
    for (int64_t leaf = 0; leaf < leaves_; ++leaf) normalize(token, leaf, factor);
    store_quantized_row(epilogue_, token, row_.data());
  }

 private:
  static void store(void* base, int64_t index, const LeafType& leaf) {
    std::memcpy(static_cast<char*>(base) + index * int64_t{sizeof(leaf)}, &leaf, sizeof(leaf));
  }

  // Replaces the leaf in row_ by its norm.
  void normalize(int64_t token, int64_t leaf, float factor) {
    float n[kLeafElements];
    float gamma[kLeafElements];
    float* const x = &row_[static_cast<size_t>(leaf * kLeafElements)];
    Elements::widen(Elements::load(epilogue_.gamma, leaf), gamma);
    for (int i = 0; i < kLeafElements; ++i) {
      n[i] = rms_norm_element(x[i], factor, add_rn(epilogue_.weight_bias, gamma[i]));
    }
    const LeafType rounded = Elements::narrow(n);
    if (epilogue_.norm_out != nullptr) {
      store(epilogue_.norm_out, token * leaves_ + leaf, rounded);
    }
    Elements::widen(rounded, n);
    std::memcpy(x, n, sizeof(n));
  }

  void report_row(int64_t token, int32_t row) const {
    const WaitFor what{AllReduceFault::kBadIndex, static_cast<uint32_t>(token), 0};
    report_fault(cta_, args_.memory, what, static_cast<uint32_t>(row));
  }

  const RankArgs& args_;
  const EpilogueArgs& epilogue_;
  Cta& cta_;
  int64_t leaves_;
  RmsNormSum squares_;
  std::vector<float> row_;  // The token's residual sums, then their norm.
};

}  // namespace narrowfloat

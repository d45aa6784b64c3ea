// The list of formats. A new format is one header, one include, one list entry and one enumerator.
#pragma once

#include "base/bad_enumerator.h"
#include "formats/fp8_block.h"
#include "formats/mx.h"
#include "formats/nvfp4.h"

namespace narrowfloat {

template <BlockFormat... Formats>
struct FormatList {
  static constexpr int kSize = sizeof...(Formats);

  // Calls visitor.template operator()<Format>() for each format in order.
  template <typename Visitor>
  static void for_each(Visitor&& visitor) {
    (visitor.template operator()<Formats>(), ...);
  }

  // Calls the visitor for the format with this id.
  template <typename Visitor>
  static void visit(FormatId id, Visitor&& visitor) {
    const bool found =
        ((Formats::kId == id ? (visitor.template operator()<Formats>(), true) : false) || ...);
    if (!found) throw_bad_enumerator("format", static_cast<int>(id));
  }
};

// The entries are in the order of FormatId.
using AllFormats =
    FormatList<Nvfp4, Nvfp4PerToken, Mxfp4, Mxfp8, Fp8Block1x128, Fp8Block128x128, Fp8Tensor>;

template <typename Visitor>
void visit_format(FormatId id, Visitor&& visitor) {
  AllFormats::visit(id, visitor);
}

}  // namespace narrowfloat

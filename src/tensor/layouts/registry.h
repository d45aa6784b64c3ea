// The list of scale layouts. A new layout is one header, one include, one list entry and one
// enumerator. Each is a bijection from (row, block) into a buffer of padded extents (spec 8.2).
#pragma once

#include "base/bad_enumerator.h"
#include "tensor/layouts/linear.h"
#include "tensor/layouts/mn_major.h"
#include "tensor/layouts/swizzled_128x4.h"
#include "tensor/layouts/swizzled_8x4.h"

namespace narrowfloat {

template <typename... Layouts>
struct LayoutList {
  template <typename Visitor>
  static void for_each(Visitor&& visitor) {
    (visitor.template operator()<Layouts>(), ...);
  }
  template <typename Visitor>
  static void visit(ScaleLayoutId id, Visitor&& visitor) {
    const bool found =
        ((Layouts::kId == id ? (visitor.template operator()<Layouts>(), true) : false) || ...);
    if (!found) throw_bad_enumerator("scale layout", static_cast<int>(id));
  }

  // offset() and place() of a layout that is data in device code: a branch that all threads take
  // the same way, instead of a kernel per layout. `id` is one of the list.
  NF_HOST_DEVICE static constexpr int64_t offset(ScaleLayoutId id, int64_t row, int64_t block,
                                                 const ScaleExtents& extents) {
    int64_t result = 0;
    static_cast<void>(
        ((Layouts::kId == id ? (result = Layouts::offset(row, block, extents), true) : false) ||
         ...));
    return result;
  }
  NF_HOST_DEVICE static constexpr ScalePlace place(ScaleLayoutId id, int64_t offset,
                                                   const ScaleExtents& extents) {
    ScalePlace result;
    static_cast<void>(
        ((Layouts::kId == id ? (result = Layouts::place(offset, extents), true) : false) || ...));
    return result;
  }
};

// The entries are in the order of ScaleLayoutId.
using AllLayouts = LayoutList<LinearLayout, Swizzled128x4Layout, Swizzled8x4Layout, MnMajorLayout>;

template <typename Visitor>
void visit_layout(ScaleLayoutId id, Visitor&& visitor) {
  AllLayouts::visit(id, visitor);
}

}  // namespace narrowfloat

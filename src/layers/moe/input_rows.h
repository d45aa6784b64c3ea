// Coding rows inside the layer: plain inputs into the mode's format, with the bits of quantize(),
// and FC1's result where a layer quantizes it twice.
#pragma once

#include "narrowfloat/moe_types.h"

namespace narrowfloat {

// rows: BF16, F16 or F32 [rows, cols], dense.
// multiplier: of the static formats. output: as RowBuffers::bind makes it.
void code_rows(const TensorView& rows, RowFormat format, float multiplier, const CodedRows& output);

// Row `row` of output is the row's token, coded with the multiplier of the expert of the row's
// tile: for every row that a slot has.
void code_slot_rows(const TensorView& tokens, const Permutation& permutation, RowFormat format,
                    const PerExpert& multiplier, const CodedRows& output);

// As code_rows for the rows that `slot_to_row` names. rows: F32 or F64, which is rounded to fp32
// first.
void code_listed_rows(const TensorView& rows, const TensorView& slot_to_row, RowFormat format,
                      const CodedRows& output);

}  // namespace narrowfloat

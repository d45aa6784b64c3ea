// Quantizes rows inside the layer, with the bits of quantize(): unquantized inputs to the mode's
// row format, and FC1's result where a layer quantizes it twice. The operation is internal: the
// layer has checked or made its arguments.
#pragma once

#include "moe_shared/dequantized_rows.h"
#include "narrowfloat/moe_types.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

// Which rows of the output are written, and from which rows.
enum class RowChoice : int {
  kAll = 0,       // Row p from row p.
  kGathered = 1,  // Row p from row map[p]; none where that is negative.
  kListed = 2,    // For each i, row map[i] from itself; none where that is negative.
};

struct QuantizeActivationsArgs {
  TensorView rows;  // BF16, F16 or F32 [rows, cols], dense. CPU: F64 too, rounded to fp32 first.
  RowFormat format = RowFormat::kFp8Group;
  // Static formats only. With a value per expert, row p has that of the expert of its tile.
  PerExpert multiplier;
  RowChoice choice = RowChoice::kAll;
  // I32; kGathered: one for each row of the output; kListed: rows, each once, of an output with
  // as many rows as `rows`; for kAll absent.
  TensorView map;
  TensorView tile_to_expert;
  int32_t token_tile = 0;
  CodedRows output;
  DequantizedRows dequantized;  // Optional, on a GPU; without factors.
};

void quantize_activations(const QuantizeActivationsArgs& args, Stream stream);

}  // namespace narrowfloat

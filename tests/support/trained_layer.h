// Layers of the small trained model (models/tiny-moe) in every mode, with the inputs that the model
// itself gave them: real weights and activations for accuracy tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "narrowfloat/moe_checkpoint.h"

namespace narrowfloat::testing {

// Its directory: models/tiny-moe where the test was started, else of the source tree.
std::string trained_model();

// The first tokens of a layer's input and the output that its training framework computed.
struct RecordedTokens {
  int64_t tokens = 0;
  std::vector<uint16_t> x;      // bf16 [tokens, 256]
  std::vector<float> logits;    // [tokens, 16]
  std::vector<uint8_t> output;  // bf16

  // Into this object.
  [[nodiscard]] MoeInputs inputs() const;
  [[nodiscard]] Routing routing() const;
};
RecordedTokens recorded_tokens(int64_t layer, int64_t tokens);

// Options for the model in `mode`; static scales leave room for its largest activations.
LoadMoeOptions options_for(MoeMode mode);

// Largest distance to the layer on unquantized weights and fp32 rows: what each mode was seen to
// cost on these activations, with a quarter of room.
double loss_bound(MoeMode mode);

// Runs a layer on the CPU.
std::vector<float> run_layer(const MoeLayer& layer, const RecordedTokens& recorded);
// Unquantized weights, fp32 rows and results, fp64 sums.
std::vector<float> run_unquantized(int64_t layer, const RecordedTokens& recorded);

}  // namespace narrowfloat::testing

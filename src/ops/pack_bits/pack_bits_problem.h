// Packing of bits as data (see quantize_problem.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "narrowfloat/pack_bits.h"
#include "runtime/support.h"
#include "tensor/indices.h"

namespace narrowfloat {

struct PackBitsProblem {
  Device device;
  int64_t elements = 0;
  int64_t segments = -1;  // -1: one run without offsets.
  BitOrder order = BitOrder::kBig;
};
std::string to_string(const PackBitsProblem& problem);

struct PackBitsArgs {
  const uint8_t* input = nullptr;
  uint8_t* output = nullptr;
  int64_t output_bytes = 0;
  Indices offsets;                 // [segments + 1]
  void* output_offsets = nullptr;  // Same width as `offsets`.
};

struct PackBitsImpl {
  std::string_view name;
  Support (*supports)(const PackBitsProblem& problem);
  void (*run)(const PackBitsProblem& problem, const PackBitsArgs& args, Stream stream);
};

// Ordered, fastest first, the oracle last.
std::span<const PackBitsImpl> pack_bits_impls();
extern const PackBitsImpl kPackBitsCpuReference;
extern const PackBitsImpl kPackBitsCpuBaseline;
extern const PackBitsImpl kPackBitsSm90;  // Only in builds with CUDA, like the next.
extern const PackBitsImpl kPackBitsSm80;

}  // namespace narrowfloat

// Tensors of files as fp32 in memory, and the way back to bf16: what the commands that compute with
// plain code (eval, moe run) need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "narrowfloat/safetensors.h"

namespace narrowfloat::cli {

// F32, BF16 or F16 values, exactly. Throws kUnsupported for another type.
std::vector<float> to_floats(std::span<const std::byte> bytes, DType dtype);

// Rounded to nearest, ties to even; a NaN stays one.
std::vector<uint16_t> to_bf16(std::span<const float> values);

// The whole tensor as fp32. Throws kUnsupported, naming it, for a type that is not plain.
std::vector<float> read_floats(const SafetensorsReader& file, const TensorInfo& tensor);
// The first `size_bytes` of it.
std::vector<float> read_floats(const SafetensorsReader& file, const TensorInfo& tensor,
                               uint64_t size_bytes);

}  // namespace narrowfloat::cli

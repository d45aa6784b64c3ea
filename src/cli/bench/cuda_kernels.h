// Kernels of the benchmarks themselves: input data, comparisons, and traffic without arithmetic.
// `stream` is a cudaStream_t of the current device. Addresses are aligned to 16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cli/bench/machine.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat::cli {

// Normal values, element i the same whatever the range it is in.
void queue_normal_fill(std::byte* to, DType dtype, int64_t first, int64_t count, void* stream);

// Words of 8 bytes, the last one cut off: the same as fill_random_words() makes from 0 on.
void queue_random_words(std::byte* to, uint64_t size_bytes, const RandomWords& words, void* stream);

// Sets *flag to 1 where 16-byte words differ; never clears it.
void queue_comparison(const std::byte* a, const std::byte* b, uint64_t size_bytes, int* flag,
                      void* stream);

// Reads and writes as many bytes as asked for, up to multiples of 16.
void queue_traffic_kernel(const Traffic& traffic, const TrafficShape& shape, Stream stream);

}  // namespace narrowfloat::cli

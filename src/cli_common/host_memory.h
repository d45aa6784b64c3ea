// Data in host memory that commands make or read themselves: random words, tensors of files as
// fp32, buffers; and the threads that fill them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "narrowfloat/safetensors.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat::cli {

// Calls body(i) once for every i in [0, count), in any order, on the threads that the library may
// use (--threads); the library's own loops are not public. The first exception reaches the caller
// after all threads have ended.
void for_each_index(int64_t count, const std::function<void(int64_t)>& body);

// Words of 8 bytes that are the same on every machine: word i is a hash of `seed` and i where
// `mask` has ones, plus `base`. No sum may carry from one element of a word into the next.
struct RandomWords {
  uint64_t seed = 0;
  uint64_t mask = ~uint64_t{0};
  uint64_t base = 0;
};
uint64_t random_word_bits(uint64_t seed, uint64_t index);
// Writes bytes [first, first + size_bytes) of the words, by several threads.
void fill_random_words(std::byte* to, uint64_t first, uint64_t size_bytes,
                       const RandomWords& words);

// Bytes whose address is a multiple of 256, as workspaces want it.
class AlignedBytes {
 public:
  explicit AlignedBytes(int64_t size_bytes);
  [[nodiscard]] TensorView view() const;  // U8 [size]

 private:
  int64_t size_;
  std::vector<std::byte> storage_;
};

// Views of dense rows in memory: F32 and BF16.
TensorView matrix_view(std::span<const float> values, int64_t cols);
TensorView matrix_view(std::span<const uint16_t> values, int64_t cols);

// F32, BF16 or F16 values, exactly. Throws kUnsupported for another type.
std::vector<float> to_floats(std::span<const std::byte> bytes, DType dtype);
// Rounds to nearest, ties to even; a NaN stays one.
std::vector<uint16_t> to_bf16(std::span<const float> values);

// The whole tensor as fp32, or its first `size_bytes`. Throws kUnsupported, naming the tensor, for
// a type that is not plain.
std::vector<float> read_floats(const SafetensorsReader& file, const TensorInfo& tensor);
std::vector<float> read_floats(const SafetensorsReader& file, const TensorInfo& tensor,
                               uint64_t size_bytes);

}  // namespace narrowfloat::cli

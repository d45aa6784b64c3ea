// Sizes, counts, shapes and devices as people write and read them. Reading throws kInvalidArgument
// that says what was expected.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "narrowfloat/tensor.h"

namespace narrowfloat::cli {

// "512 B", "14.48 MB": decimal units, as disks and the default shard size use them.
std::string format_bytes(uint64_t size_bytes);

// "1500000", "1.5M", "2 GB": powers of 1000. "2GiB": powers of 1024. Case does not matter.
uint64_t parse_bytes(std::string_view text);

// "0.25 s", "12.5 s", "3m 20s", "1h 05m".
std::string format_duration(double seconds);

// With so many decimals, and no sign before a zero.
std::string format_fixed(double value, int decimals);

// "256x128"; "scalar" for rank 0.
std::string format_shape(std::span<const int64_t> shape);

struct MatrixShape {
  int64_t rows = 0;
  int64_t cols = 0;
};
// "4096x4096".
MatrixShape parse_shape(std::string_view text);
// The same with at least one row and one column.
MatrixShape parse_nonempty_shape(std::string_view text);

// A whole number in [low, high], or an error that says what was expected.
int64_t parse_count(std::string_view text, int64_t low, int64_t high, std::string_view expected);
// "1,8,64": each from 1 to `high`.
std::vector<int64_t> parse_count_list(std::string_view text, int64_t high,
                                      std::string_view expected);

// "bf16", "fp16" or "fp32", and the spellings of safetensors files ("BF16", "F8_E4M3", ...).
DType parse_dtype_option(std::string_view text);

// "cpu", "cuda" (that is cuda:0) or "cuda:N".
Device parse_device(std::string_view text);

}  // namespace narrowfloat::cli

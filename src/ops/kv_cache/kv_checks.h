// Checks of the KV caches that operations take (see tensor/view_checks.h).
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/kv_cache/kv_problem.h"
#include "tensor/view_checks.h"

namespace narrowfloat {

// The shape that all parts of a call share.
struct KvShape {
  DType number = DType::kBF16;  // Type of inputs or outputs.
  Device device;
  int64_t pages = 0;
  int64_t page_size = 0;
  int64_t heads = 0;
};

// Keys or values of a call: numbers and their codes, with their names in messages.
struct KvNamed {
  std::string_view argument;
  const TensorView& numbers;
  std::string_view codes_argument;
  const KvCodes& codes;
};

void require_math(MathMode math);
void require_layout(KvLayout layout);

// A factor from its scale; `default_value` replaces an absent scale.
KvFactor require_scale(std::string_view argument, const KvScale& scale, Device device,
                       float default_value);

// The pages, page size and heads of `cache`, from the values of K.
KvShape cache_shape(const PagedKvCache& cache, DType number, Device device);

// Steps of (page, entry, head) of the values and scales of one side, whose head_dim is `head_dim`.
struct KvCodeSteps {
  KvSteps values{};
  KvSteps scales{};
};
KvCodeSteps require_codes(std::string_view argument, const KvCodes& codes, const KvShape& shape,
                          KvLayout layout, int64_t head_dim);
// Requires scales of one side, of any four extents.
void require_stored_scales(std::string_view argument, const TensorView& scales, Device device);
// The bytes of a tensor.
inline uint8_t* bytes_of(const TensorView& view) { return static_cast<uint8_t*>(view.data); }

KvSteps paged_steps(const TensorView& view, KvLayout layout);

// Requires a strided tensor of numbers: last stride 1; on CUDA 16-byte steps. Returns the steps of
// the axes before the last, in bytes.
std::vector<int64_t> require_numbers(std::string_view argument, const TensorView& view,
                                     std::initializer_list<DType> allowed, Device device);

// Requires I32 or I64, dense, of this many values.
Indices require_indices(std::string_view argument, const TensorView& view, int64_t count,
                        Device device);

// Returns the head_dim of a tensor of numbers, and requires a multiple of `multiple`.
int64_t require_head_dim(std::string_view argument, const TensorView& view, int64_t multiple);

}  // namespace narrowfloat

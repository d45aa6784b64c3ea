// Views of tensors: pointer, element type, device, extents and strides. A view owns nothing and is
// cheap to copy. Extents and strides count elements (never bytes) and are 64-bit everywhere.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "narrowfloat/export.h"

namespace narrowfloat {

// Element types: all dtypes of the safetensors format, whose spelling name() uses.
enum class DType : int {
  kBool = 0,
  kF4 = 1,  // Packed E2M1, two elements a byte.
  kF6E2M3 = 2,
  kF6E3M2 = 3,
  kU8 = 4,
  kI8 = 5,
  kF8E5M2 = 6,
  kF8E4M3 = 7,  // The "fn" flavour: no infinity, largest 448.
  kF8E8M0 = 8,
  kF8E4M3Fnuz = 9,
  kF8E5M2Fnuz = 10,
  kI16 = 11,
  kU16 = 12,
  kF16 = 13,
  kBF16 = 14,
  kI32 = 15,
  kU32 = 16,
  kF32 = 17,
  kC64 = 18,
  kF64 = 19,
  kI64 = 20,
  kU64 = 21,
};
inline constexpr int kNumDTypes = 22;

// Bits of one element: 4, 6, 8, 16, 32 or 64.
NARROWFLOAT_API int bits(DType dtype);
// "BF16", "F8_E4M3", ...: the spelling of the safetensors format.
NARROWFLOAT_API std::string_view name(DType dtype);
// Inverse of name(); empty for an unknown spelling.
NARROWFLOAT_API std::optional<DType> parse_dtype(std::string_view text);

enum class DeviceType : int { kCpu = 0, kCuda = 1 };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

// "cpu" or "cuda:N".
NARROWFLOAT_API std::string to_string(Device device);

// The stream that CUDA work is queued on; ignored on the CPU. Operations never synchronize with it.
struct Stream {
  void* handle = nullptr;  // cudaStream_t of the tensors' device; null: its default stream.
  // Programmatic dependent launch: an operation's kernels may start while the work queued before
  // them still ends, and wait for it on the device before they touch memory. Results are the same,
  // and sequences of short operations get faster. Inside a capture the graph gets programmatic
  // edges.
  bool programmatic_launch = false;
};

struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;  // Operations never write through the views of their inputs.
  DType dtype = DType::kF32;
  Device device;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};  // In elements; the last one must be 1.

  // A dense row-major view. Throws kInvalidArgument for a rank above 4 or a negative extent.
  NARROWFLOAT_API static TensorView contiguous(const void* data, DType dtype,
                                               std::initializer_list<int64_t> shape,
                                               Device device = {});

  // Product of the extents; 1 for rank 0. Throws kInvalidArgument where it exceeds 63 bits, and for
  // a rank that no view has.
  [[nodiscard]] NARROWFLOAT_API int64_t num_elements() const;
  // True for the "no tensor" view: used for optional arguments.
  [[nodiscard]] bool is_absent() const { return data == nullptr && rank == 0; }
};

// "BF16[4, 96]": for messages.
NARROWFLOAT_API std::string to_string(const TensorView& view);

}  // namespace narrowfloat

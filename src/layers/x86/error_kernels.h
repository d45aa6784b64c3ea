// The inner loop of the error figures as a table of functions, one for each level of x86 vector
// instructions. docs/architecture.md has the rules for the sources of a level.
//
// The kernels have the bits of the portable loop in error_figures.cpp, whose lanes they share.
#pragma once

#include <cstdint>

namespace narrowfloat {

// Element i of a row is summed in lane i % kErrorLanes.
inline constexpr int64_t kErrorLanes = 8;

struct ErrorLanes {
  double error_squares[kErrorLanes] = {};
  double x_squares[kErrorLanes] = {};
  double y_squares[kErrorLanes] = {};
  double products[kErrorLanes] = {};
};

// Figures of a piece of a row that need no lanes.
struct PieceFigures {
  double max_abs = 0;
  int64_t clipped = 0;
  int64_t flushed = 0;
};

enum class ErrorOperand : int { kF32 = 0, kBf16 = 1, kF16 = 2 };

struct PieceOperands {
  const void* x = nullptr;  // At any address.
  const void* y = nullptr;
  int64_t count = 0;  // A multiple of kErrorLanes, at most 2^30.
  // An entry for every block_cols elements, a multiple of kErrorLanes; nullptr if there are none.
  const float* limits = nullptr;
  int64_t block_cols = 0;
};

struct ErrorKernels {
  // Adds to lanes and figures; they are of no use if some element or sum is not finite, which the
  // sums show.
  using Add = void (*)(const PieceOperands& piece, ErrorLanes& lanes, PieceFigures& figures);
  Add add[3][3];  // Indexed by the types of x and y.
};

extern const ErrorKernels kErrorKernelsAvx2;
extern const ErrorKernels kErrorKernelsAvx512;

}  // namespace narrowfloat

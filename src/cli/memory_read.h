// How fast this machine reads memory: what a layer that streams its weights is compared with.
#pragma once

namespace narrowfloat::cli {

// Billions of bytes a second that all threads together read from a large buffer; the median of runs
// over at least `min_seconds`.
double read_gb_per_second(double min_seconds);

}  // namespace narrowfloat::cli

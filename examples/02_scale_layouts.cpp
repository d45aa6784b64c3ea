// Prints the position of some block scales of a quantized tensor in each layout that NVFP4 allows,
// then converts a scale tensor to another layout and back.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "narrowfloat/narrowfloat.h"

namespace nf = narrowfloat;

namespace {

constexpr int64_t kRows = 40;
constexpr int64_t kBlocks = 6;  // NVFP4 has 16 elements a block: 96 columns.

nf::ScaleView view_of(std::vector<uint8_t>& scales, nf::ScaleLayoutId layout) {
  scales.resize(static_cast<size_t>(nf::scale_image_size(layout, kRows, kBlocks)));
  nf::ScaleView view;
  view.data = scales.data();
  view.type = nf::ScaleType::kE4M3;
  view.layout = layout;
  view.rows = kRows;
  view.blocks = kBlocks;
  view.capacity = static_cast<int64_t>(scales.size());
  return view;
}

void print_offsets(nf::ScaleLayoutId layout) {
  std::printf("\n%s: %lld bytes for %lld x %lld scales\n", std::string(nf::name(layout)).c_str(),
              static_cast<long long>(nf::scale_image_size(layout, kRows, kBlocks)),
              static_cast<long long>(kRows), static_cast<long long>(kBlocks));
  for (const int64_t row : {0, 1, 31, 32, 39}) {
    std::printf("  row %2lld at", static_cast<long long>(row));
    for (int64_t block = 0; block < kBlocks; ++block) {
      const int64_t offset = nf::scale_offset(layout, row, block, kRows, kBlocks);
      std::printf(" %5lld", static_cast<long long>(offset));
    }
    std::printf("\n");
  }
}

// True if a scale tensor comes back unchanged from `layout`.
bool survives(nf::ScaleLayoutId layout) {
  std::vector<uint8_t> original;
  std::vector<uint8_t> moved;
  std::vector<uint8_t> returned;
  const nf::ScaleView linear = view_of(original, nf::ScaleLayoutId::kLinear);
  for (size_t i = 0; i < original.size(); ++i) original[i] = static_cast<uint8_t>(i % 120 + 1);
  const nf::ScaleView other = view_of(moved, layout);
  nf::relayout(nf::FormatId::kNvfp4, linear, other);
  nf::relayout(nf::FormatId::kNvfp4, other, view_of(returned, nf::ScaleLayoutId::kLinear));
  return returned == original;
}

}  // namespace

int main() {
  try {
    const nf::FormatInfo& format = nf::format_info(nf::FormatId::kNvfp4);
    for (const auto layout : {nf::ScaleLayoutId::kLinear, nf::ScaleLayoutId::kSwizzled128x4,
                              nf::ScaleLayoutId::kSwizzled8x4, nf::ScaleLayoutId::kMnMajor}) {
      if (!format.allows(layout)) continue;
      print_offsets(layout);
      if (!survives(layout)) return 1;
      std::printf("  linear -> %s -> linear: identical\n", std::string(nf::name(layout)).c_str());
    }
  } catch (const nf::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

// See transfer.h.
#include "cli/moe/transfer.h"

#include <algorithm>

namespace narrowfloat::cli {
namespace {

constexpr uint64_t kTransferAlignment = 256;

uint64_t aligned(uint64_t size_bytes) {
  return (size_bytes + kTransferAlignment - 1) / kTransferAlignment * kTransferAlignment;
}
uint64_t size_of(const TensorView& view) {
  return view.is_absent() ? 0 : static_cast<uint64_t>(view.num_elements() * bits(view.dtype) / 8);
}
uint64_t size_of(const ScaleView& view) {
  return view.data == nullptr ? 0 : static_cast<uint64_t>(view.capacity * bytes(view.type));
}

}  // namespace

void Transfer::add(TensorView& view) { add(view.data, size_of(view), &view.device); }
void Transfer::add(ScaleView& view) { add(view.data, size_of(view), &view.device); }

void Transfer::add(const RandomTensor& tensor, MoeWeights& weights) {
  made_.push_back(
      {&tensor.data(weights), tensor.size_bytes, &tensor.device(weights), &tensor.words});
}

void Transfer::send() {
  uint64_t total = 0;
  for (const Copy& copy : copies_) total += aligned(copy.size_bytes);
  for (const Made& made : made_) total += aligned(made.size_bytes);
  for (const Buffer& buffer : buffers_) total += aligned(buffer.size_bytes);
  std::byte* to = machine_.reserve(std::max(total, kTransferAlignment));
  for (const Copy& copy : copies_) {
    machine_.write(to, static_cast<const std::byte*>(*copy.data), copy.size_bytes);
    *copy.data = to;
    *copy.device = machine_.device();
    to += aligned(copy.size_bytes);
  }
  for (const Made& made : made_) {
    machine_.fill_words(to, *made.words, made.size_bytes);
    *made.data = to;
    *made.device = machine_.device();
    to += aligned(made.size_bytes);
  }
  for (const Buffer& buffer : buffers_) {
    *buffer.data = to;
    to += aligned(buffer.size_bytes);
  }
}

}  // namespace narrowfloat::cli

// run() must not allocate. Every operator new of this program counts while a test asks for it; the
// thread pool's own bookkeeping goes through an allocator of its own and is not counted.
#include <atomic>
#include <cstdlib>
#include <new>

#include <gtest/gtest.h>

#include "support/environment.h"
#include "support/moe_case.h"

namespace {

std::atomic<bool> is_counting{false};
std::atomic<int64_t> num_allocations{0};

void* allocate(std::size_t size) {
  if (is_counting.load(std::memory_order_relaxed)) ++num_allocations;
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size); }
void* operator new[](std::size_t size) { return allocate(size); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  if (is_counting.load(std::memory_order_relaxed)) ++num_allocations;
  const auto align = static_cast<std::size_t>(alignment);
  void* memory = std::aligned_alloc(align, (size + align - 1) / align * align);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory, std::align_val_t /*alignment*/) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*size*/, std::align_val_t /*alignment*/) noexcept {
  std::free(memory);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*size*/) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t /*size*/) noexcept { std::free(memory); }

namespace narrowfloat::testing {
namespace {

// Allocations of one run.
int64_t count_allocations(const MoeCase& layer_case, const MoeLayer& layer, const MoeInputs& inputs,
                          const Routing& routing) {
  const int64_t tokens = layer_case.shape().tokens;
  const int64_t hidden = layer_case.shape().hidden;
  std::vector<uint16_t> out(static_cast<size_t>(tokens * hidden));
  std::vector<uint8_t> memory(static_cast<size_t>(layer.required_workspace(tokens)) + 256);
  auto* aligned =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
  const TensorView workspace =
      TensorView::contiguous(aligned, DType::kU8, {layer.required_workspace(tokens)});
  MoeOutputs outputs;
  outputs.out = TensorView::contiguous(out.data(), DType::kBF16, {tokens, hidden});
  layer.run(inputs, routing, outputs, workspace);  // Starts the worker threads.
  num_allocations = 0;
  is_counting = true;
  layer.run(inputs, routing, outputs, workspace);
  is_counting = false;
  return num_allocations;
}

class MoeAllocation : public ::testing::TestWithParam<MoeMode> {};

INSTANTIATE_TEST_SUITE_P(Moe, MoeAllocation, ::testing::ValuesIn(every_moe_mode()), mode_test_name);

TEST_P(MoeAllocation, NoneInRun) {
  const MoeShape shape{.tokens = 50, .hidden = 256, .inter = 128, .experts = 8, .top_k = 2};
  MoeCase layer_case(GetParam(), shape, Activation::swiglu(), 1);
  layer_case.add_biases();
  EXPECT_EQ(count_allocations(layer_case, layer_case.prepare(), layer_case.inputs(),
                              layer_case.routing()),
            0);
}

TEST(MoeAllocation, NoneWithGroupsAndDoubleQuantization) {
  const MoeShape shape{.tokens = 30, .hidden = 256, .inter = 128, .experts = 16, .top_k = 4};
  MoeCase layer_case(MoeMode::kFp8Block, shape, Activation::swiglu(), 2);
  layer_case.config().routing.method = RoutingMethod::kDeepSeekV3;
  layer_case.config().routing.n_group = 4;
  layer_case.config().routing.topk_group = 2;
  layer_case.add_router_bias();
  const MoeLayer layer = layer_case.prepare_reference({.double_quantize_fc1 = true});
  EXPECT_EQ(count_allocations(layer_case, layer, layer_case.inputs(), layer_case.routing()), 0);
}

TEST(MoeAllocation, ThePoolsOwnDoNotCountButOursWould) {
  num_allocations = 0;
  is_counting = true;
  const std::vector<int> probe(100);
  is_counting = false;
  EXPECT_EQ(num_allocations, 1) << probe.size();
}

}  // namespace
}  // namespace narrowfloat::testing

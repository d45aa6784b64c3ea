// Tensors on their way to the memory of a machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cli/bench/machine.h"
#include "cli/moe/random_layer.h"
#include "narrowfloat/moe.h"

namespace narrowfloat::cli {

// Host tensors that go to the device together.
class Transfer {
 public:
  explicit Transfer(Machine& machine) : machine_(machine) {}

  void add(TensorView& view);
  void add(ScaleView& view);
  void add(PerExpert& given) { add(given.values); }
  // Memory that nothing is copied to.
  void add_buffer(std::byte*& data, uint64_t size_bytes) {
    buffers_.push_back({&data, size_bytes});
  }

  // A tensor that the machine makes itself.
  void add(const RandomTensor& tensor, MoeWeights& weights);

  // Places everything, the views then are views of it.
  void send();

 private:
  struct Copy {
    void** data;
    uint64_t size_bytes;
    Device* device;
  };
  struct Made {
    void** data;
    uint64_t size_bytes;
    Device* device;
    const RandomWords* words;
  };
  struct Buffer {
    std::byte** data;
    uint64_t size_bytes;
  };
  void add(void*& data, uint64_t size_bytes, Device* device) {
    if (data != nullptr) copies_.push_back({&data, size_bytes, device});
  }

  Machine& machine_;
  std::vector<Copy> copies_;
  std::vector<Made> made_;
  std::vector<Buffer> buffers_;
};

}  // namespace narrowfloat::cli

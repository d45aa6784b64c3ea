// safetensors_copy IN OUT: copies a safetensors file, tensors and metadata, with our reader and
// writer. The Python tests hold both against the reference implementation with it.
#include <algorithm>
#include <exception>
#include <iostream>
#include <vector>

#include "narrowfloat/safetensors.h"

namespace {

// Small, so that most tensors are written in several ranges.
constexpr uint64_t kRangeBytes = 1000;

void copy(const std::string& source, const std::string& target) {
  const narrowfloat::SafetensorsReader reader(source);
  std::vector<narrowfloat::TensorSpec> specs;
  for (const narrowfloat::TensorInfo& tensor : reader.tensors()) {
    specs.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  narrowfloat::SafetensorsWriter writer(target, specs, reader.metadata());
  std::vector<std::byte> buffer(kRangeBytes);
  for (const narrowfloat::TensorInfo& tensor : reader.tensors()) {
    for (uint64_t begin = 0; begin < tensor.size_bytes; begin += kRangeBytes) {
      const auto range = std::span(buffer).first(std::min(kRangeBytes, tensor.size_bytes - begin));
      reader.read(tensor, begin, range);
      writer.write(tensor.name, begin, range);
    }
  }
  writer.commit();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: safetensors_copy IN OUT\n";
    return 2;
  }
  try {
    copy(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}

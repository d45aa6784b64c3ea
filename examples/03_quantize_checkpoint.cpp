// Quantizes a whole checkpoint (a .safetensors file or a model directory) to NVFP4 in the
// compressed-tensors convention, and reports which tensors were touched and what it cost.
//
//     03_quantize_checkpoint models/tiny-moe /tmp/tiny-moe-nvfp4
#include <cstdio>
#include <map>
#include <string>

#include "narrowfloat/narrowfloat.h"

namespace nf = narrowfloat;

namespace {

void print_report(const nf::CheckpointReport& report) {
  std::map<std::string, int> num_copied;  // Reason -> tensors.
  int num_quantized = 0;
  const nf::TensorReport* worst = nullptr;
  for (const nf::TensorReport& tensor : report.tensors) {
    if (tensor.action != "quantize") {
      ++num_copied[tensor.reason];
      continue;
    }
    ++num_quantized;
    if (!tensor.figures) continue;
    if (worst == nullptr || tensor.figures->sqnr_db < worst->figures->sqnr_db) worst = &tensor;
  }

  std::printf("%d tensors quantized\n", num_quantized);
  for (const auto& [reason, count] : num_copied) {
    std::printf("%d tensors copied: %s\n", count, reason.c_str());
  }
  std::printf("size: %.2f MB -> %.2f MB\n", static_cast<double>(report.source_bytes) / 1e6,
              static_cast<double>(report.target_bytes) / 1e6);
  std::printf("quantized weights: SQNR %.2f dB, cosine %.5f\n", report.total.sqnr_db,
              report.total.cosine);
  if (worst != nullptr) {
    std::printf("worst tensor: %s, %.2f dB\n", worst->name.c_str(), worst->figures->sqnr_db);
  }
}

// Prints the tensors at `path` as any reader finds them: quantized ones are recognised by their
// contents.
void print_contents(const std::string& path) {
  const nf::Checkpoint checkpoint(path);
  int num_quantized = 0;
  for (const nf::LogicalTensor& tensor : nf::recognise(checkpoint)) {
    if (tensor.convention && ++num_quantized == 1) {
      std::printf("first quantized tensor: %s, stored as\n", tensor.name.c_str());
      for (const std::string& part : tensor.parts) std::printf("  %s\n", part.c_str());
    }
  }
  std::printf("%d quantized tensors recognised in %s\n", num_quantized, path.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: 03_quantize_checkpoint SRC DST\n");
    return 2;
  }
  try {
    nf::QuantizeCheckpointOptions options;
    options.to = nf::parse_convention("nvfp4-ct");
    options.exclude = {
        "*.layers.0.*"};   // Globs over names; here the first layer is copied unchanged.
    options.force = true;  // Replace what an earlier run left at DST.
    print_report(nf::quantize_checkpoint(argv[1], argv[2], options));
    print_contents(argv[2]);
  } catch (const nf::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

// Dequantizers: every format to BF16 and F32 from the format's default layout. There is one
// arithmetic, so there is no math mode.
//
//     dequantize/<format>/<output>/<rows>x<cols>
//     dequantize_by/<implementation>/<format>/...    each implementation, a small shape
//
// Bytes are values + scales with their padding + global scales + output.
#include "bench_support.h"

namespace narrowfloat::bench {
namespace {

struct DequantizeCase {
  FormatId format;
  DType output;
  Shape shape;
  std::string implementation = {};  // Empty: the one the library chooses.
};

ExplainRequest explain_request(const DequantizeCase& what) {
  return {.format = what.format,
          .dtype = what.output,
          .rows = what.shape.rows,
          .cols = what.shape.cols};
}

class PreparedDequantize {
 public:
  explicit PreparedDequantize(const DequantizeCase& what)
      : what_(what),
        input_(what.format, what.shape),
        output_(make_bytes(what.shape.elements() * bits(what.output) / 8)) {
    const Bytes original = make_input(DType::kBF16, what.shape.elements());
    quantize(
        TensorView::contiguous(original.data(), DType::kBF16, {what.shape.rows, what.shape.cols}),
        input_.view());
  }

  void run() {
    const Pinned pinned("dequantize", what_.implementation);
    dequantize_to(output_);
  }

  [[nodiscard]] std::string check() {
    Bytes expected(output_.size(), std::byte{0xCC});
    std::fill(output_.begin(), output_.end(), std::byte{0x33});
    run();
    const Pinned pinned("dequantize", kOracle);
    dequantize_to(expected);
    return output_ == expected ? "" : "output";
  }

  [[nodiscard]] int64_t bytes() const {
    return input_.size_bytes() + static_cast<int64_t>(output_.size());
  }

  [[nodiscard]] std::string implementation() const {
    return chosen_implementation("dequantize", what_.implementation, explain_request(what_));
  }

 private:
  void dequantize_to(Bytes& output) {
    dequantize(input_.view(), TensorView::contiguous(output.data(), what_.output,
                                                     {what_.shape.rows, what_.shape.cols}));
  }

  DequantizeCase what_;
  QuantizedBuffers input_;
  Bytes output_;
};

void add(const DequantizeCase& what) {
  const std::string details = fmt::format("{}/{}", name(what.format), name(what.output));
  register_case<PreparedDequantize>(case_name("dequantize", what, details), what);
}

void register_all() {
  for (const FormatInfo& format : all_formats()) {
    for (const DType output : {DType::kBF16, DType::kF32}) {
      for (const Shape& shape : kShapes) {
        add({.format = format.id, .output = output, .shape = shape});
      }
    }
    add_each_implementation<DequantizeCase>(
        "dequantize", {.format = format.id, .output = DType::kBF16, .shape = kSmallShape}, add);
  }
}

}  // namespace
}  // namespace narrowfloat::bench

int main(int argc, char** argv) {
  return narrowfloat::bench::run_program(argc, argv, narrowfloat::bench::register_all);
}

// Quantizers: every format, both math modes, BF16 and F32 input, in the format's default layout.
//
//     quantize/<format>/<math>/<input>/<rows>x<cols>           the default call
//     quantize/<format>:scale_given/...                        without the pass for the maximum
//     quantize_by/<implementation>/<format>/...                each implementation, a small shape
//
// Bytes are input + values + scales with their padding + global scales; where the call computes its
// scale from the tensor's maximum, the input counts twice.
#include "bench_support.h"

namespace narrowfloat::bench {
namespace {

struct QuantizeCase {
  FormatId format;
  MathMode math;
  DType input;
  Shape shape;
  bool scale_given = false;
  std::string implementation = {};  // Empty: the one the library chooses.
};

// Formats with a scale of the whole tensor, computed from the maximum or given.
bool has_tensor_scale(FormatId format) {
  const FormatInfo& info = format_info(format);
  return (info.has_global_scale && !info.has_row_scale) || info.block_rows == 0;
}

ExplainRequest explain_request(const QuantizeCase& what) {
  return {.format = what.format,
          .math = what.math,
          .dtype = what.input,
          .rows = what.shape.rows,
          .cols = what.shape.cols};
}

class PreparedQuantize {
 public:
  explicit PreparedQuantize(const QuantizeCase& what)
      : what_(what),
        input_(make_input(what.input, what.shape.elements())),
        output_(what.format, what.shape) {
    options_.math = what.math;
    if (!what.scale_given) return;
    if (format_info(what.format).has_global_scale) {
      options_.encode_scale = encode_scale_from_amax(0.1F);
    } else {
      options_.fp8_decode_scale = 0.1F / 448.0F;
    }
  }

  void run() {
    const Pinned pinned("quantize", what_.implementation);
    quantize_to(output_);
  }

  [[nodiscard]] std::string check() {
    QuantizedBuffers expected(what_.format, what_.shape);
    expected.poison(0xCC);
    output_.poison(0x33);
    run();
    const Pinned pinned("quantize", kOracle);
    quantize_to(expected);
    return output_.difference(expected);
  }

  [[nodiscard]] int64_t bytes() const {
    const bool two_passes = has_tensor_scale(what_.format) && !what_.scale_given;
    return static_cast<int64_t>(input_.size()) * (two_passes ? 2 : 1) + output_.size_bytes();
  }

  [[nodiscard]] std::string implementation() const {
    return chosen_implementation("quantize", what_.implementation, explain_request(what_));
  }

 private:
  void quantize_to(QuantizedBuffers& output) const {
    quantize(
        TensorView::contiguous(input_.data(), what_.input, {what_.shape.rows, what_.shape.cols}),
        output.view(), options_);
  }

  QuantizeCase what_;
  Bytes input_;
  QuantizedBuffers output_;
  QuantizeOptions options_;
};

void add(const QuantizeCase& what) {
  const std::string details =
      fmt::format("{}{}/{}/{}", name(what.format), what.scale_given ? ":scale_given" : "",
                  name(what.math), name(what.input));
  register_case<PreparedQuantize>(case_name("quantize", what, details), what);
}

void register_all() {
  for (const FormatInfo& format : all_formats()) {
    for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
      for (const DType input : {DType::kBF16, DType::kF32}) {
        for (const Shape& shape : kShapes) {
          const QuantizeCase what{
              .format = format.id, .math = math, .input = input, .shape = shape};
          add(what);
          if (!has_tensor_scale(format.id)) continue;
          QuantizeCase given = what;
          given.scale_given = true;
          add(given);
        }
      }
      add_each_implementation<QuantizeCase>(
          "quantize",
          {.format = format.id, .math = math, .input = DType::kBF16, .shape = kSmallShape}, add);
    }
  }
}

}  // namespace
}  // namespace narrowfloat::bench

int main(int argc, char** argv) {
  return narrowfloat::bench::run_program(argc, argv, narrowfloat::bench::register_all);
}

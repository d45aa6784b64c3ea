// Both directions of the words are here, so that they agree.
#include "python/src/words.h"

#include "narrowfloat/error.h"
#include "python/src/choices.h"

namespace narrowfloat::python {

Device parse_device(const std::string& text) {
  if (text == "cpu") return {};
  if (text == "cuda") return {.type = DeviceType::kCuda, .index = 0};
  const std::string digits = text.starts_with("cuda:") ? text.substr(5) : "";
  if (digits.empty() || digits.size() > 4 ||
      digits.find_first_not_of("0123456789") != std::string::npos) {
    throw Error(ErrorKind::kInvalidArgument,
                "device: expected cpu, cuda or cuda:N; got \"" + text + "\"");
  }
  return {.type = DeviceType::kCuda, .index = std::stoi(digits)};
}

DType parse_float_type(std::string_view argument, std::string_view text) {
  return parse_choice<DType>(
      argument, text,
      {{"bfloat16", DType::kBF16}, {"float16", DType::kF16}, {"float32", DType::kF32}});
}

std::string_view float_type_name(DType dtype) {
  if (dtype == DType::kF32) return "float32";
  return dtype == DType::kF16 ? "float16" : "bfloat16";
}

}  // namespace narrowfloat::python

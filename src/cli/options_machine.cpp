// Options of the commands that look at the machine: explain, doctor.
#include <fmt/format.h>

#include "cli/option_helpers.h"
#include "cli/size_text.h"

namespace narrowfloat::cli {
namespace {

constexpr const char* kExplainExamples = R"(Examples:
  narrowfloat explain quantize --format nvfp4 --shape 4096x4096
  narrowfloat explain dequantize --format mxfp8 --shape 128x2880 --dtype fp16 --json
)";
constexpr const char* kDoctorExamples = R"(Examples:
  narrowfloat doctor --json > bug-report.json
)";
}  // namespace

void add_explain(CLI::App& app, ExplainArguments& arguments) {
  CLI::App& command =
      add_command(app, "explain", "Show which implementation an operation would use, and why",
                  kExplainExamples);
  ExplainRequest& request = arguments.request;
  command.add_option("OP", arguments.op, fmt::format("One of {}", fmt::join(operations(), ", ")))
      ->required()
      ->option_text(" ");
  add_parsed_into(command, "--format", parse_format, request.format,
                  fmt::format("One of {}", format_list()))
      ->required()
      ->option_text("FORMAT REQUIRED");
  add_parsed(
      command, "--shape", parse_shape,
      [&request](MatrixShape shape) {
        request.rows = shape.rows;
        request.cols = shape.cols;
      },
      "Rows and columns")
      ->required()
      ->option_text("MxK REQUIRED");
  add_parsed_into(command, "--layout", parse_scale_layout, request.scale_layout,
                  "Scale layout; default that of the format")
      ->option_text("LAYOUT");
  add_parsed_into(command, "--math", parse_math_mode, request.math,
                  "Arithmetic: exact (default) or fast")
      ->option_text("MODE");
  add_parsed_into(command, "--dtype", parse_dtype_option, request.dtype,
                  "High-precision side: bf16 (default), fp16 or fp32")
      ->option_text("DTYPE");
  add_parsed_into(command, "--device", parse_device, request.device, "cpu (default) or cuda:N")
      ->option_text("DEVICE");
  add_output(command, arguments.output, CsvSupport::kNo);
}

void add_doctor(CLI::App& app, DoctorArguments& arguments) {
  CLI::App& command =
      add_command(app, "doctor", "Show what this build and this machine can do", kDoctorExamples);
  add_output(command, arguments.output, CsvSupport::kNo);
}

}  // namespace narrowfloat::cli

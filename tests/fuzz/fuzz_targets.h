// Fuzz targets: functions of any bytes. They must end with a result that keeps its promises or with
// a narrowfloat::Error about the input, whatever the bytes are; anything else is a bug: another
// exception, an Error that says so (kDevice), a report of a sanitizer, a crash.
//
// tools/long_tests.sh runs them with libFuzzer (libfuzzer_main.cpp), the tests with the inputs that
// are kept in corpus/ (replay_test.cpp).
#pragma once

#include <cstdint>
#include <span>

namespace narrowfloat::testing {

// Header of a safetensors file: a byte of flags (1: lenient, 2: a whole file follows), the number
// of data bytes (2 bytes), JSON.
void fuzz_header(std::span<const uint8_t> bytes);
// model.safetensors.index.json.
void fuzz_index(std::span<const uint8_t> bytes);
// config.json: declared quantization, exclusions, routing of experts, and changes to its text.
void fuzz_config(std::span<const uint8_t> bytes);
// Calls of the C++ API with any shapes, strides, enumerators and options.
void fuzz_api(std::span<const uint8_t> bytes);
// Arguments of the program narrowfloat, each ended by a NUL or a newline. No command is run.
void fuzz_command_line(std::span<const uint8_t> bytes);

}  // namespace narrowfloat::testing

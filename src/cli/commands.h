// The commands of narrowfloat. Each function declares one: its options, and what runs where it is
// chosen. Commands print to stdout and stderr, return the exit code of what they found, and throw
// narrowfloat::Error.
#pragma once

namespace narrowfloat::cli {

struct Commands;

// Declares all commands of the program.
void add_commands(const Commands& commands);
// Runs the program; returns its exit code.
int run(int argc, const char* const* argv);

void add_quantize(const Commands& commands);
void add_dequantize(const Commands& commands);
void add_convert(const Commands& commands);
void add_inspect(const Commands& commands);
void add_check(const Commands& commands);
void add_diff(const Commands& commands);
void add_report(const Commands& commands);
void add_explain(const Commands& commands);
void add_doctor(const Commands& commands);
void add_moe_explain(const Commands& commands);
void add_moe_place(const Commands& commands);
void add_moe_tune(const Commands& commands);

}  // namespace narrowfloat::cli

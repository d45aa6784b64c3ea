// Errors of the operating system with errno's text, and random bytes from the kernel.
#pragma once

#include <cerrno>
#include <cstddef>
#include <span>
#include <string>

namespace narrowfloat {

// Throws kIo: "what: text of `code`".
[[noreturn]] void throw_system_error(const std::string& what, int code = errno);

void fill_random(std::span<std::byte> bytes);
// 32 hexadecimal digits that nobody can guess.
std::string random_name();

}  // namespace narrowfloat

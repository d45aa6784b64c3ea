// Weight files that are not safetensors; they are refused with a hint. Pickle files run code when
// they are loaded, so nothing here ever opens one.
#pragma once

#include <string>
#include <string_view>

namespace narrowfloat {

// Whether the file name ends like a weight file of another format (.bin, .pt, .pth, .ckpt, .gguf).
bool has_foreign_name(std::string_view path);

// Throws kInvalidArgument with a hint if it does.
void refuse_foreign_name(const std::string& path);

// "; this looks like ..." for the first bytes of a file that is something else; empty otherwise.
std::string describe_foreign_content(std::string_view first_bytes);

}  // namespace narrowfloat

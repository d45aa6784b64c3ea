// Two small tables: file name endings and first bytes.
#include "checkpoint/foreign_format.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "base/throw_error.h"
#include "checkpoint/escape.h"

namespace narrowfloat {
namespace {

struct ForeignFormat {
  std::string_view mark;  // File name ending, or first bytes.
  std::string_view hint;
};

constexpr std::string_view kPickleHint =
    "a pickle file, which can run code when it is loaded; convert it to safetensors first, for "
    "example with transformers' save_pretrained(..., safe_serialization=True)";

constexpr std::array kByName = {
    ForeignFormat{".bin", kPickleHint},
    ForeignFormat{".pt", kPickleHint},
    ForeignFormat{".pth", kPickleHint},
    ForeignFormat{".ckpt", kPickleHint},
    ForeignFormat{".gguf", "a GGUF file; start from the safetensors checkpoint it was made of"},
};

constexpr std::array kByContent = {
    ForeignFormat{"version ", "a Git LFS pointer: fetch the file itself with 'git lfs pull'"},
    ForeignFormat{"GGUF", "a GGUF file"},
    ForeignFormat{"PK\x03\x04", "a zip archive, perhaps a PyTorch pickle file"},
    ForeignFormat{"<", "an HTML or XML page: the download went wrong"},
};

const ForeignFormat* find_by_name(std::string_view path) {
  std::string lower(path);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto* found =
      std::find_if(kByName.begin(), kByName.end(),
                   [&](const ForeignFormat& format) { return lower.ends_with(format.mark); });
  return found == kByName.end() ? nullptr : found;
}

}  // namespace

bool has_foreign_name(std::string_view path) { return find_by_name(path) != nullptr; }

void refuse_foreign_name(const std::string& path) {
  const ForeignFormat* format = find_by_name(path);
  if (format == nullptr) return;
  throw_invalid("{}: is not read: {}", printable(path), format->hint);
}

std::string describe_foreign_content(std::string_view first_bytes) {
  for (const ForeignFormat& format : kByContent) {
    if (first_bytes.starts_with(format.mark))
      return fmt::format("; this looks like {}", format.hint);
  }
  return "";
}

}  // namespace narrowfloat

// The one table of both names. A field that is missing here is shown as the library wrote it.
#include "cli/option_spelling.h"

#include <array>
#include <cctype>

namespace narrowfloat::cli {
namespace {

struct Spelling {
  std::string_view field;  // Of QuantizeCheckpointOptions or DequantizeCheckpointOptions.
  std::string_view option;
};
constexpr std::array kSpellings = {
    Spelling{"include", "--include"},
    Spelling{"exclude", "--exclude"},
    Spelling{"mx_scale", "--mx-scale"},
    Spelling{"scale_search", "--scale-search"},
    Spelling{"keep_nonfinite", "--nonfinite keep"},
    Spelling{"max_memory_bytes", "--max-memory"},
    Spelling{"max_shard_bytes", "--max-shard-size"},
    Spelling{"dry_run", "--dry-run"},
    Spelling{"force", "--force"},
    Spelling{"dtype", "--dtype"},
};

constexpr std::string_view kMark = "option ";

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// The field that `text` begins with; nullptr if none.
const Spelling* spelling_at(std::string_view text) {
  for (const Spelling& spelling : kSpellings) {
    if (!text.starts_with(spelling.field)) continue;
    if (text.size() == spelling.field.size() || !is_word(text[spelling.field.size()])) {
      return &spelling;
    }
  }
  return nullptr;
}

}  // namespace

std::string with_option_spelling(std::string_view message) {
  std::string text;
  while (true) {
    const size_t mark = message.find(kMark);
    if (mark == std::string_view::npos) return text.append(message);
    text.append(message.substr(0, mark));
    message.remove_prefix(mark + kMark.size());
    const Spelling* spelling = spelling_at(message);
    text.append(spelling == nullptr ? kMark : spelling->option);
    if (spelling != nullptr) message.remove_prefix(spelling->field.size());
  }
}

}  // namespace narrowfloat::cli

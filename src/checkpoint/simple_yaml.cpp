// Lines first, with their indentation; then blocks by recursive descent. Keys that occur twice, and
// bytes that are not UTF-8, are left to the reader of the JSON.
#include "checkpoint/simple_yaml.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "base/throw_error.h"
#include "checkpoint/escape.h"

namespace narrowfloat {
namespace {

constexpr int kMaxDepth = 16;
constexpr std::string_view kBlanks = " \t";
// The first characters of what is more than a plain string.
constexpr std::string_view kRefused = "&!|>%@`{}[],?";

struct Line {
  int number = 0;
  size_t indent = 0;
  std::string_view text;  // Without indentation and trailing blanks; not empty, no comment.
};

bool is_item(std::string_view text) { return text == "-" || text.starts_with("- "); }

bool is_flow(std::string_view text) { return text.front() == '[' || text.front() == '{'; }

bool is_quote(char c) { return c == '"' || c == '\''; }

std::string_view without_blanks(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(kBlanks), text.size()));
  return text;
}

std::string_view without_end_blanks(std::string_view text) {
  return text.substr(0, text.find_last_not_of(kBlanks) + 1);
}

bool is_end(std::string_view text) {
  text = without_blanks(text);
  return text.empty() || text.front() == '#';
}

class YamlReader {
 public:
  YamlReader(std::string_view text, std::string_view source) : source_(source) { split(text); }

  std::string run() {
    if (lines_.empty()) {
      throw_error(ErrorKind::kCorruptData, "{}: has nothing but comments", source_);
    }
    block(lines_.front().indent, 0);
    if (at_ < lines_.size()) {
      refuse(lines_[at_], "is indented as no line before it that it could belong to");
    }
    return std::move(json_);
  }

 private:
  [[noreturn]] void refuse(const Line& line, std::string_view why) const {
    throw_error(ErrorKind::kCorruptData, "{}: line {}: '{}' {}", source_, line.number,
                printable(std::string(line.text), 60), why);
  }

  [[noreturn]] void refuse_feature(const Line& line, std::string_view what) const {
    throw_error(ErrorKind::kUnsupported,
                "{}: line {}: '{}': {}; recipes take mappings, lists and strings of YAML, or JSON",
                source_, line.number, printable(std::string(line.text), 60), what);
  }

  void split(std::string_view text) {
    int number = 0;
    while (!text.empty()) {
      const size_t end = std::min(text.find('\n'), text.size());
      std::string_view line = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
      ++number;
      line = line.substr(0, line.find_last_not_of(" \t\r") + 1);
      const size_t indent = std::min(line.find_first_not_of(' '), line.size());
      add({number, indent, line.substr(indent)});
    }
  }

  void add(const Line& line) {
    if (is_end(line.text)) return;
    if (line.text.front() == '\t') refuse(line, "is indented by a tab; use spaces");
    const bool is_marker = line.indent == 0 && (line.text == "---" || line.text == "...");
    if (is_marker && lines_.empty() && line.text == "---") return;
    if (is_marker) refuse_feature(line, "several documents are not read");
    lines_.push_back(line);
  }

  void block(size_t indent, int depth) {
    if (depth > kMaxDepth) refuse(lines_[at_], "is nested too deeply");
    if (is_item(lines_[at_].text)) {
      list(indent, depth);
    } else if (is_flow(lines_[at_].text)) {
      const Line line = lines_[at_++];
      value(line, line.text);
    } else {
      mapping(indent, depth);
    }
  }

  void mapping(size_t indent, int depth) {
    char separator = '{';
    while (at_ < lines_.size() && lines_[at_].indent == indent && !is_item(lines_[at_].text)) {
      const Line line = lines_[at_++];
      std::string_view rest = line.text;
      json_ += separator;
      key(line, rest);
      json_ += ':';
      separator = ',';
      if (is_end(rest)) {
        child(line, indent, depth, true);
      } else {
        value(line, without_blanks(rest));
      }
    }
    json_ += '}';
  }

  void list(size_t indent, int depth) {
    char separator = '[';
    while (at_ < lines_.size() && lines_[at_].indent == indent && is_item(lines_[at_].text)) {
      const Line line = lines_[at_];
      json_ += separator;
      separator = ',';
      const std::string_view rest = without_blanks(line.text.substr(1));
      if (is_end(rest)) {
        ++at_;
        child(line, indent, depth, false);
      } else if (is_item(rest) || has_key(rest)) {
        // The rest of the line is the first of a block that is indented as far as it.
        lines_[at_].indent += static_cast<size_t>(rest.data() - line.text.data());
        lines_[at_].text = rest;
        block(lines_[at_].indent, depth + 1);
      } else {
        ++at_;
        value(line, rest);
      }
    }
    json_ += ']';
  }

  // Reads the block that belongs to a line of nothing but a key or dash. A list may be indented as
  // its key is.
  void child(const Line& line, size_t indent, int depth, bool is_of_key) {
    const bool is_there = at_ < lines_.size();
    const bool is_deeper = is_there && lines_[at_].indent > indent;
    const bool is_list =
        is_there && is_of_key && lines_[at_].indent == indent && is_item(lines_[at_].text);
    if (!is_deeper && !is_list) refuse(line, "has no value");
    block(lines_[at_].indent, depth + 1);
  }

  // The place of the colon after a plain key; npos if there is none.
  static size_t find_colon(std::string_view text) {
    for (size_t at = text.find(':'); at != std::string_view::npos; at = text.find(':', at + 1)) {
      if (at + 1 == text.size() || kBlanks.find(text[at + 1]) != std::string_view::npos) {
        return at < text.find(" #") ? at : std::string_view::npos;
      }
    }
    return std::string_view::npos;
  }

  static bool has_key(std::string_view text) {
    if (!is_quote(text.front())) return !is_flow(text) && find_colon(text) != text.npos;
    const size_t end = text.find(text.front(), 1);
    return end != text.npos && without_blanks(text.substr(end + 1)).starts_with(':');
  }

  // Takes a key and its colon from the beginning of `rest`. A plain key ends before each of `ends`.
  void key(const Line& line, std::string_view& rest, std::string_view ends = {}) {
    size_t colon = 0;
    if (is_quote(rest.front())) {
      write(quoted(line, rest));
      colon = find_colon(rest);
      if (!without_blanks(rest.substr(0, colon)).empty()) colon = std::string_view::npos;
    } else {
      refuse_special(line, rest.front());
      colon = find_colon(rest.substr(0, rest.find_first_of(ends)));
      if (colon == 0) colon = std::string_view::npos;
      if (colon != std::string_view::npos) write(without_end_blanks(rest.substr(0, colon)));
    }
    if (colon == std::string_view::npos) refuse(line, "is no 'KEY: VALUE'");
    rest.remove_prefix(colon + 1);
  }

  void refuse_special(const Line& line, char first) const {
    if (first == '*') refuse_feature(line, "'*' begins an alias; put globs in quotes");
    if (kRefused.find(first) != std::string_view::npos) {
      refuse_feature(line, fmt::format("what begins with '{}' is not read", first));
    }
  }

  void value(const Line& line, std::string_view rest) {
    if (is_flow(rest)) {
      flow(line, rest, 0);
    } else if (is_quote(rest.front())) {
      write(quoted(line, rest));
    } else {
      write(plain(line, rest, rest.size()));
      rest = {};
    }
    if (!is_end(rest)) refuse(line, "has more after its value");
  }

  // The plain string at the beginning of `rest`, which ends there at the latest.
  std::string_view plain(const Line& line, std::string_view rest, size_t end) const {
    refuse_special(line, rest.front());
    std::string_view text = rest.substr(0, end);
    text = text.substr(0, text.find(" #"));
    text = without_end_blanks(text);
    if (is_item(text)) refuse(line, "has a list on the line of its key; begin it on the next");
    if (find_colon(text) != std::string_view::npos) {
      refuse(line, "has a ':' in its value; put it in quotes");
    }
    return text;
  }

  // Takes a string in quotes from the beginning of `rest`.
  std::string quoted(const Line& line, std::string_view& rest) const {
    const char quote = rest.front();
    std::string text;
    for (size_t i = 1; i < rest.size(); ++i) {
      if (rest[i] == quote) {
        const bool is_doubled = quote == '\'' && i + 1 < rest.size() && rest[i + 1] == quote;
        if (!is_doubled) {
          rest.remove_prefix(i + 1);
          return text;
        }
        ++i;
      } else if (quote == '"' && rest[i] == '\\') {
        ++i;
        const bool is_known = i < rest.size() && (rest[i] == '"' || rest[i] == '\\');
        if (!is_known) refuse_feature(line, "of escapes only \\\" and \\\\ are read");
      }
      text += rest[i];
    }
    refuse(line, "has no closing quote on its line");
  }

  // Takes a list in brackets or a mapping in braces, on one line.
  void flow(const Line& line, std::string_view& rest, int depth) {
    if (depth > kMaxDepth) refuse(line, "is nested too deeply");
    const bool is_mapping = rest.front() == '{';
    const char close = is_mapping ? '}' : ']';
    json_ += rest.front();
    rest = without_blanks(rest.substr(1));
    for (bool is_first = true; !rest.starts_with(close); is_first = false) {
      if (!is_first) {
        if (!rest.starts_with(',')) refuse(line, "has no ',' or end after an entry");
        rest = without_blanks(rest.substr(1));
        json_ += ',';
      }
      if (is_end(rest)) refuse(line, "has no end of its brackets on its line");
      if (is_mapping) {
        key(line, rest, ",]}");
        rest = without_blanks(rest);
        json_ += ':';
        if (is_end(rest)) refuse(line, "has no value after a key");
      }
      flow_entry(line, rest, depth);
      rest = without_blanks(rest);
    }
    rest.remove_prefix(1);
    json_ += close;
  }

  void flow_entry(const Line& line, std::string_view& rest, int depth) {
    if (is_flow(rest)) {
      flow(line, rest, depth + 1);
    } else if (is_quote(rest.front())) {
      write(quoted(line, rest));
    } else {
      const size_t end = std::min(rest.find_first_of(",[]{}"), rest.size());
      if (rest.substr(0, end).find(" #") != std::string_view::npos) {
        refuse(line, "has a comment before the end of its brackets");
      }
      write(plain(line, rest, end));
      rest.remove_prefix(end);
    }
  }

  void write(std::string_view text) {
    json_ += '"';
    for (const char c : text) {
      if (c == '"' || c == '\\') json_ += '\\';
      json_ += c;
    }
    json_ += '"';
  }

  std::string_view source_;
  std::vector<Line> lines_;
  size_t at_ = 0;  // The next line.
  std::string json_;
};

}  // namespace

std::string json_of_simple_yaml(std::string_view text, std::string_view source) {
  return YamlReader(text, source).run();
}

}  // namespace narrowfloat

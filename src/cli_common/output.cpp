// Writes go straight to the descriptors: results are few and large, and every failure is seen.
#include "cli_common/output.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <system_error>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>

#include "narrowfloat/safetensors.h"

namespace narrowfloat::cli {
namespace {

constexpr int kSchemaVersion = 1;
constexpr bool kAsciiOnly = true;
// Paths need not be UTF-8.
constexpr auto kOnBadUtf8 = Json::error_handler_t::replace;
constexpr std::string_view kClearLine = "\r\x1b[K";

std::string_view name_of_program = "narrowfloat";

std::string indented(const Json& json) { return json.dump(2, ' ', kAsciiOnly, kOnBadUtf8); }

// Returns 0, or the errno that stopped the writing.
int write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return 0;
}

// Without TERM nothing is known about the terminal.
bool is_dumb_terminal() {
  const char* const term = std::getenv("TERM");
  return term == nullptr || std::string_view(term) == "dumb";
}

// ANSI codes of the basic palette follow the user's theme, on dark and on light ground.
std::string_view color_code(Tone tone) {
  switch (tone) {
    case Tone::kPlain:
      return "";
    case Tone::kHeading:
      return "\x1b[1m";
    case Tone::kGood:
      return "\x1b[32m";
    case Tone::kBad:
      return "\x1b[31m";
    case Tone::kFaint:
      return "\x1b[2m";
  }
  return "";
}

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U; }

// A cell is quoted only if it has to be.
std::string csv_cell(std::string_view text) {
  if (text.find_first_of(",\"\r\n") == std::string_view::npos) return std::string(text);
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

}  // namespace

// The switch has no default: a new error kind does not compile until it has an exit code.
ExitCode exit_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return ExitCode::kUsage;
    case ErrorKind::kIo:
    case ErrorKind::kCorruptData:
      return ExitCode::kInput;
    case ErrorKind::kUnsupported:
      return ExitCode::kUnsupported;
    case ErrorKind::kDevice:
      return ExitCode::kInternal;
  }
  return ExitCode::kInternal;
}

void set_program_name(std::string_view name) { name_of_program = name; }
std::string_view program_name() { return name_of_program; }

void reserve_standard_streams() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) != -1 || errno != EBADF) continue;
    // It is opened for the wrong direction, so that using it fails as on a closed stream. open()
    // returns the lowest free descriptor, which is this one.
    const int flags = descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY;
    if (::open("/dev/null", flags) != descriptor) _exit(static_cast<int>(ExitCode::kInput));
  }
}

void write_stdout(std::string_view text) {
  const int error = write_all(STDOUT_FILENO, text);
  if (error == 0 || error == EPIPE) return;
  throw Error(ErrorKind::kIo, fmt::format("writing to standard output: {}", std::strerror(error)));
}

void write_stderr(std::string_view text) { write_all(STDERR_FILENO, text); }

void warn(std::string_view text) {
  write_stderr(fmt::format("{}: warning: {}\n", name_of_program, text));
}

std::string escaped(std::string_view text) { return printable(text, std::string::npos); }

size_t display_width(std::string_view text) {
  size_t width = 0;
  for (const char c : text) width += is_continuation(c) ? 0 : 1;
  return width;
}

std::string shortened(std::string_view text, size_t width) {
  if (display_width(text) <= width) return std::string(text);
  constexpr std::string_view kMark = "...";
  if (width <= kMark.size()) return std::string(kMark.substr(0, width));
  size_t columns = 0;
  size_t end = 0;
  while (columns < width - kMark.size() || is_continuation(text[end])) {
    columns += is_continuation(text[end]) ? 0 : 1;
    ++end;
  }
  return std::string(text.substr(0, end)) + std::string(kMark);
}

bool stderr_is_terminal() { return ::isatty(STDERR_FILENO) == 1 && !is_dumb_terminal(); }

bool is_colored(ColorMode mode) {
  if (mode != ColorMode::kAuto) return mode == ColorMode::kAlways;
  // no-color.org: the variable counts if it is set and not empty.
  const char* const no_color = std::getenv("NO_COLOR");
  if (no_color != nullptr && *no_color != '\0') return false;
  return ::isatty(STDOUT_FILENO) == 1 && !is_dumb_terminal();
}

std::string paint(std::string_view text, Tone tone, bool colored) {
  if (!colored || tone == Tone::kPlain) return std::string(text);
  return fmt::format("{}{}\x1b[0m", color_code(tone), text);
}

StatusLine::~StatusLine() {
  if (is_shown_) write_stderr(kClearLine);
}

void StatusLine::show(std::string_view text) {
  if (is_shown_) write_stderr(fmt::format("{}{}", kClearLine, text));
}

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

void Table::add_row(std::vector<std::string> cells, Tone tone) {
  rows_.push_back({std::move(cells), tone});
}

std::string Table::to_text(bool colored) const {
  std::vector<size_t> widths;
  for (const Column& column : columns_) widths.push_back(display_width(column.name));
  for (const Row& row : rows_) {
    for (size_t i = 0; i < widths.size(); ++i) {
      widths[i] = std::max(widths[i], display_width(row.cells[i]));
    }
  }
  const auto line = [&](const std::vector<std::string>& cells, Tone tone) {
    std::string text;
    for (size_t i = 0; i < widths.size(); ++i) {
      const std::string padding(widths[i] - display_width(cells[i]), ' ');
      const bool is_right = columns_[i].align == Align::kRight;
      if (i > 0) text += "  ";
      text += is_right ? padding + cells[i] : cells[i] + padding;
    }
    // Trailing blanks would show when a line is copied or compared.
    text.erase(text.find_last_not_of(' ') + 1);
    return paint(text, tone, colored) + "\n";
  };
  std::vector<std::string> names;
  for (const Column& column : columns_) names.push_back(column.name);
  std::string text = line(names, Tone::kHeading);
  for (const Row& row : rows_) text += line(row.cells, row.tone);
  return text;
}

std::string Table::to_csv() const {
  std::string text;
  const auto append = [&](size_t index, std::string_view cell) {
    if (index > 0) text += ',';
    text += csv_cell(cell);
  };
  for (size_t i = 0; i < columns_.size(); ++i) append(i, columns_[i].name);
  text += '\n';
  for (const Row& row : rows_) {
    for (size_t i = 0; i < columns_.size(); ++i) append(i, row.cells[i]);
    text += '\n';
  }
  return text;
}

std::string format_bytes(uint64_t size_bytes) {
  if (size_bytes < 1000) return fmt::format("{} B", size_bytes);
  constexpr std::array<std::string_view, 6> kNames = {"kB", "MB", "GB", "TB", "PB", "EB"};
  double value = static_cast<double>(size_bytes) / 1000;
  size_t unit = 0;
  // 999.995 would be printed as 1000.00.
  while (value >= 999.995 && unit + 1 < kNames.size()) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{:.2f} {}", value, kNames[unit]);
}

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  if (seconds < 10) return fmt::format("{:.2f} s", seconds);
  if (seconds < 60) return fmt::format("{:.1f} s", seconds);
  constexpr double kLongest = 1e9;  // Nobody waits longer, and the conversion stays defined.
  const auto whole = static_cast<int64_t>(std::min(seconds, kLongest));
  if (whole < 3600) return fmt::format("{}m {:02}s", whole / 60, whole % 60);
  return fmt::format("{}h {:02}m", whole / 3600, whole / 60 % 60);
}

std::string format_fixed(double value, int decimals) {
  std::string text = fmt::format("{:.{}f}", value, decimals);
  if (text.starts_with('-') && text.find_first_not_of("-0.") == std::string::npos) text.erase(0, 1);
  return text;
}

std::string format_shape(std::span<const int64_t> shape) {
  return shape.empty() ? "scalar" : fmt::format("{}", fmt::join(shape, "x"));
}

double billions_per_second(double amount, double seconds) {
  return seconds > 0 ? amount / seconds / 1e9 : 0;
}

double percent_of(double part, double whole) { return whole > 0 ? 100 * part / whole : 0; }

Json json_document(std::string_view command) {
  return Json{{"schema_version", kSchemaVersion}, {"command", command}};
}

Json json_number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

void print_json(const Json& document) { write_stdout(indented(document) + "\n"); }

void print_json(const Json& document, std::string_view list, size_t count,
                const std::function<Json(size_t)>& item) {
  constexpr size_t kWriteBytes = size_t{1} << 20;
  std::string text = indented(document);
  text.resize(text.rfind("\n}"));
  text += fmt::format(",\n  {}: [", Json(list).dump());
  for (size_t i = 0; i < count; ++i) {
    text += i == 0 ? "\n    " : ",\n    ";
    // A newline in a string is escaped, so each of these begins a line.
    for (const char c : indented(item(i))) {
      text += c;
      if (c == '\n') text += "    ";
    }
    if (text.size() < kWriteBytes) continue;
    write_stdout(text);
    text.clear();
  }
  write_stdout(text + (count == 0 ? "]\n}\n" : "\n  ]\n}\n"));
}

void print_json_event(const Json& event) {
  write_stderr(event.dump(-1, ' ', kAsciiOnly, kOnBadUtf8) + "\n");
}

void check_output_file(std::string_view option, const std::string& path, bool may_replace) {
  const auto refuse = [&](ErrorKind kind, std::string_view what) {
    throw Error(kind, fmt::format("{} {}: {}", option, printable(path), what));
  };
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (std::filesystem::exists(status)) {
    if (!std::filesystem::is_regular_file(status)) refuse(ErrorKind::kIo, "is no regular file");
    if (!may_replace) refuse(ErrorKind::kInvalidArgument, "exists; --force replaces it");
  }
  const std::string parent = std::filesystem::path(path).parent_path().string();
  if (::access(parent.empty() ? "." : parent.c_str(), W_OK | X_OK) != 0) {
    refuse(ErrorKind::kIo, fmt::format("cannot be made: {}", std::strerror(errno)));
  }
}

}  // namespace narrowfloat::cli

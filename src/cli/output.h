// Where output goes and what it looks like: data to stdout, everything else to stderr, tables for
// people, CSV for spreadsheets, colour where it helps. JSON is in json_output.h.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/arguments.h"

namespace narrowfloat::cli {

// Keeps files that are opened later from getting the descriptors of closed standard streams: what
// is printed would end up in them. Call first.
void reserve_standard_streams();

// All of `text`, now. A reader that went away (a closed pipe) is no error: what it did not want is
// dropped. Throws kIo for everything else, such as a full disk.
void write_stdout(std::string_view text);

// Messages and progress; a stderr that does not work is ignored.
void write_stderr(std::string_view text);

// A line "narrowfloat: warning: ...".
void warn(std::string_view text);

// printable(), whole: tables and CSV cut no name.
std::string escaped(std::string_view text);
// Columns that escaped text takes on a terminal, one per code point.
size_t display_width(std::string_view text);
// At most `width` columns of escaped text; "..." marks the cut.
std::string shortened(std::string_view text, size_t width);

bool stderr_is_terminal();
// Whether `mode` means colour on this stdout.
bool is_colored(ColorMode mode);

enum class Tone : int { kPlain, kHeading, kGood, kBad, kFaint };
std::string paint(std::string_view text, Tone tone, bool colored);

// Columns of text. Cells are printed as they are: escape names with escaped().
class Table {
 public:
  enum class Align : int { kLeft, kRight };
  struct Column {
    std::string name;
    Align align = Align::kLeft;
  };

  explicit Table(std::vector<Column> columns);
  // As many cells as columns.
  void add_row(std::vector<std::string> cells, Tone tone = Tone::kPlain);
  [[nodiscard]] bool is_empty() const { return rows_.empty(); }

  // Aligned, with a heading, for people.
  [[nodiscard]] std::string to_text(bool colored) const;
  // RFC 4180 with plain newlines; the first line has the names.
  [[nodiscard]] std::string to_csv() const;

 private:
  struct Row {
    std::vector<std::string> cells;
    Tone tone;
  };
  std::vector<Column> columns_;
  std::vector<Row> rows_;
};

}  // namespace narrowfloat::cli

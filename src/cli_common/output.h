// A program prints results on stdout and everything else on stderr, and ends with an exit code.
// Results are tables for people, CSV for spreadsheets, or one JSON document for programs.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "narrowfloat/error.h"

namespace narrowfloat::cli {

// docs/cli.md lists the exit codes for users. Scripts depend on them: a code never changes its
// meaning.
enum class ExitCode : int {
  kDone = 0,
  kFindings = 1,  // The command worked and found something: a difference, a failed check.
  kUsage = 2,     // The request can never work: wrong option, wrong value.
  kInput = 3,     // The operating system refused, or a file is malformed.
  kUnsupported =
      4,          // The request is valid, but nothing on this machine or in this version can do it.
  kInternal = 5,  // A device failed, or there is a bug.
  kInterrupted = 130,
};
ExitCode exit_code(ErrorKind kind);

enum class ColorMode : int { kAuto, kAlways, kNever };
enum class DataFormat : int { kTable, kJson, kCsv };

// Options for the form of results. Every command has them.
struct OutputArguments {
  DataFormat data = DataFormat::kTable;
  ColorMode color = ColorMode::kAuto;
  bool is_quiet = false;    // Prints errors only, and a document that --json asks for.
  bool is_verbose = false;  // Prints more rows and columns, and progress without a terminal.
};

// The name that begins every message: "narrowfloat" or "narrowfloat-bench". Set by run_program().
void set_program_name(std::string_view name);
std::string_view program_name();

// Keeps files that are opened later from getting the descriptors of closed standard streams, so
// that nothing that is printed ends up in them. Call first.
void reserve_standard_streams();

// Writes all of `text`, now. A reader that went away (a closed pipe) is no error: what it did not
// want is dropped. Throws kIo for everything else, such as a full disk.
void write_stdout(std::string_view text);

// Writes messages and progress; a stderr that does not work is ignored.
void write_stderr(std::string_view text);

// Writes a line "PROGRAM: warning: ...".
void warn(std::string_view text);

// printable() without a limit: tables and CSV cut no name.
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

// A line on the terminal that says what a command works on. It is rewritten in place, and removed
// when the object goes. Nothing is shown without a terminal or with --quiet.
class StatusLine {
 public:
  explicit StatusLine(const OutputArguments& output)
      : is_shown_(stderr_is_terminal() && !output.is_quiet) {}
  ~StatusLine();
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  void show(std::string_view text);

 private:
  bool is_shown_;
};

// Columns of text. Cells are printed as they are: escape names with escaped().
class Table {
 public:
  enum class Align : int { kLeft, kRight };
  struct Column {
    std::string name;
    Align align = Align::kLeft;
  };

  explicit Table(std::vector<Column> columns);
  // Takes as many cells as there are columns.
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

// "512 B", "14.48 MB": decimal units, as disks and the default shard size use them.
std::string format_bytes(uint64_t size_bytes);
// "0.25 s", "12.5 s", "3m 20s", "1h 05m".
std::string format_duration(double seconds);
// The text has `decimals` decimals, and a zero has no sign.
std::string format_fixed(double value, int decimals);
// "256x128"; "scalar" for rank 0.
std::string format_shape(std::span<const int64_t> shape);
// Bytes or operations over time, in billions a second; 0 where no time was measured.
double billions_per_second(double amount, double seconds);
// `part` in percent of `whole`; 0 where there is no whole.
double percent_of(double part, double whole);

// A document keeps the order in which its fields are set. Every command prints at most one, which
// begins with "schema_version" and "command". Fields are added in later versions, never changed or
// removed.
using Json = nlohmann::ordered_json;
Json json_document(std::string_view command);
// A number; infinities and NaN, which JSON does not have, are the strings "inf", "-inf" and "nan".
Json json_number(double value);
// Documents are ASCII, so that no name from a file reaches a terminal as a control sequence.
void print_json(const Json& document);
// The same text for a document with one more member at its end, the array `list` of what `item`
// returns for 0 to count - 1. Elements are printed as they are made, so that a million of them
// takes no memory.
void print_json(const Json& document, std::string_view list, size_t count,
                const std::function<Json(size_t)>& item);
// Prints an event as one line on stderr.
void print_json_event(const Json& event);

// Refuses a file that exists, unless it may be replaced, and one that cannot be made. For outputs
// that come after minutes of work: whoever cannot write them should learn that before.
void check_output_file(std::string_view option, const std::string& path, bool may_replace);

}  // namespace narrowfloat::cli

// narrowfloat: the command line program. main() reads the command line, runs one command, and turns
// whatever went wrong into a message on stderr and an exit code. Nothing escapes it.
#include <csignal>
#include <exception>
#include <new>
#include <system_error>
#include <variant>

#include <fmt/format.h>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "cli/exit_code.h"
#include "cli/option_spelling.h"
#include "cli/output.h"
#include "narrowfloat/error.h"

namespace narrowfloat::cli {
namespace {

constexpr std::string_view kBugHint =
    "this is a device fault or a bug of narrowfloat: please report it with the output of "
    "`narrowfloat doctor`";

// "error" in the line tells messages that end the program from warnings.
ExitCode fail(ExitCode code, std::string_view message) {
  write_stderr(fmt::format("narrowfloat: error: {}\n", message));
  if (code == ExitCode::kInternal) write_stderr(fmt::format("narrowfloat: {}\n", kBugHint));
  return code;
}

ExitCode answer(const Reply& reply) {
  write_stdout(reply.to_stdout);
  write_stderr(reply.to_stderr);
  return reply.code;
}

// Exceptions other than Error come from the standard library: memory, threads, or a bug.
ExitCode run_program(int argc, const char* const* argv) {
  try {
    const std::variant<Command, Reply> parsed = parse_arguments(argc, argv);
    if (const Reply* reply = std::get_if<Reply>(&parsed)) return answer(*reply);
    return std::visit([](const auto& arguments) { return run(arguments); },
                      std::get<Command>(parsed));
  } catch (const Error& error) {
    return fail(exit_code(error.kind()), with_option_spelling(error.what()));
  } catch (const std::bad_alloc&) {
    return fail(ExitCode::kInput,
                "out of memory: free some, or ask for less (--max-memory, --tokens, --bytes)");
  } catch (const std::system_error& error) {
    return fail(ExitCode::kInput, error.what());
  } catch (const std::exception& error) {
    return fail(ExitCode::kInternal, error.what());
  }
}

}  // namespace
}  // namespace narrowfloat::cli

int main(int argc, char** argv) {
  narrowfloat::cli::reserve_standard_streams();
  // A reader that closes its end shows up as EPIPE, which write_stdout() knows, instead of killing
  // the program in the middle of a file.
  std::signal(SIGPIPE, SIG_IGN);
  return static_cast<int>(narrowfloat::cli::run_program(argc, argv));
}

// The terminal is redrawn at most ten times a second; plain lines come every ten percent. Only
// functions that may be called in a signal handler are used there.
#include "cli/progress.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <signal.h>
#include <string_view>
#include <sys/ioctl.h>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>

namespace narrowfloat::cli {
namespace {

constexpr double kDrawIntervalSeconds = 0.1;
constexpr uint64_t kLineIntervalPercent = 10;
constexpr std::string_view kClearLine = "\r\x1b[K";

// Asked on every redraw: the window may have been resized.
size_t terminal_width() {
  winsize size{};
  constexpr size_t kUsual = 80;
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kUsual;
  return size.ws_col;
}

// Rounded down, so that 100 means done.
uint64_t done_percent(const ProgressEvent& event) {
  if (event.total_bytes == 0) return 100;
  const double share =
      static_cast<double>(event.done_bytes) / static_cast<double>(event.total_bytes);
  return static_cast<uint64_t>(share * 100);
}

constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};

std::atomic<bool> interrupt_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free);

// The guard puts these back; one guard lives at a time.
std::array<struct sigaction, kSignals.size()> previous_actions;

void handle_signal(int /*signal*/) {
  if (interrupt_requested.exchange(true)) _exit(static_cast<int>(ExitCode::kInterrupted));
  constexpr std::string_view kNote =
      "\ninterrupted: stopping after the current tensor (again: stop at once)\n";
  const int saved_errno = errno;
  // Nothing can be done about a stderr that does not take the note.
  [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, kNote.data(), kNote.size());
  errno = saved_errno;
}

}  // namespace

std::string progress_line(std::string_view verb, const ProgressEvent& event, double seconds) {
  std::string line = fmt::format("{} {:3}%  {} of {}", verb, done_percent(event),
                                 format_bytes(event.done_bytes), format_bytes(event.total_bytes));
  if (event.done_bytes > 0 && seconds > 0) {
    const double bytes_per_second = static_cast<double>(event.done_bytes) / seconds;
    const double left_bytes = static_cast<double>(event.total_bytes - event.done_bytes);
    line += fmt::format(", {}/s, {} left", format_bytes(static_cast<uint64_t>(bytes_per_second)),
                        format_duration(left_bytes / bytes_per_second));
  }
  return line + "  " + escaped(event.tensor);
}

Progress::Progress(std::string verb, ProgressMode mode, const OutputArguments& output)
    : verb_(std::move(verb)) {
  if (mode == ProgressMode::kJson) {
    style_ = Style::kEvents;
  } else if (mode == ProgressMode::kAuto && !output.is_quiet) {
    if (stderr_is_terminal()) {
      style_ = Style::kTerminal;
    } else if (output.is_verbose) {
      style_ = Style::kLines;
    }
  }
}

Progress::~Progress() { finish(); }

void Progress::update(const ProgressEvent& event) {
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  switch (style_) {
    case Style::kNone:
      return;
    case Style::kTerminal:
      return draw(event, seconds);
    case Style::kEvents:
      return print_json_event({{"event", "progress"},
                               {"tensor", event.tensor},
                               {"done_bytes", event.done_bytes},
                               {"total_bytes", event.total_bytes},
                               {"seconds", seconds}});
    case Style::kLines:
      const uint64_t percent = done_percent(event);
      if (percent < next_line_percent_) return;
      next_line_percent_ = percent - percent % kLineIntervalPercent + kLineIntervalPercent;
      return write_stderr(progress_line(verb_, event, seconds) + "\n");
  }
}

void Progress::draw(const ProgressEvent& event, double seconds) {
  if (seconds < next_draw_seconds_) return;
  next_draw_seconds_ = seconds + kDrawIntervalSeconds;
  is_drawn_ = true;
  // One column stays free: a full line makes some terminals wrap.
  const std::string line = shortened(progress_line(verb_, event, seconds), terminal_width() - 1);
  write_stderr(std::string(kClearLine) + line);
}

void Progress::finish() {
  if (std::exchange(is_drawn_, false)) write_stderr(kClearLine);
}

InterruptGuard::InterruptGuard() {
  interrupt_requested = false;
  struct sigaction action {};
  action.sa_handler = handle_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &previous_actions[i]);
    if (previous_actions[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

InterruptGuard::~InterruptGuard() {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &previous_actions[i], nullptr);
  }
}

bool InterruptGuard::is_requested() { return interrupt_requested; }

}  // namespace narrowfloat::cli

// The handler calls nothing that is not safe in a signal handler: a lock-free atomic, write, _exit.
#include "cli/interrupt.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <signal.h>
#include <string_view>
#include <unistd.h>

#include "cli/exit_code.h"

namespace narrowfloat::cli {
namespace {

constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};

std::atomic<bool> interrupt_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free);

// To put back what was there; one guard lives at a time.
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

// Ctrl-C. Used by commands that write files: the first one (or a SIGTERM) asks the work to stop
// cleanly, the second ends the program at once. Other commands keep the system's behaviour.
#pragma once

namespace narrowfloat::cli {

// Handles SIGINT, SIGTERM and SIGHUP while it lives. A signal the parent process ignores (nohup,
// background jobs) stays ignored. At most one at a time.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  [[nodiscard]] static bool is_requested();
};

}  // namespace narrowfloat::cli

// Commands that write a checkpoint show progress and obey Ctrl-C. Progress is always on stderr: a
// line that redraws itself on a terminal, JSON events for programs, a few plain lines with -v,
// otherwise nothing. The first Ctrl-C asks the work to stop cleanly, the second ends the program at
// once; other commands keep the system's behaviour.
#pragma once

#include <chrono>
#include <string>

#include "cli/checkpoint_report.h"
#include "narrowfloat/checkpoint.h"

namespace narrowfloat::cli {

// "quantize  42%  1.05 GB of 2.50 GB, 350.00 MB/s, 4.1 s left  model.layers.3.mlp..."
std::string progress_line(std::string_view verb, const ProgressEvent& event, double seconds);

// Every run of a command has one; update() is called from the thread that made it.
class Progress {
 public:
  Progress(std::string verb, ProgressMode mode, const OutputArguments& output);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(const ProgressEvent& event);
  // Removes the line from the terminal; the destructor does the same.
  void finish();

 private:
  enum class Style : int { kNone, kTerminal, kEvents, kLines };
  using Clock = std::chrono::steady_clock;

  void draw(const ProgressEvent& event, double seconds);

  std::string verb_;
  Style style_ = Style::kNone;
  Clock::time_point start_ = Clock::now();
  double next_draw_seconds_ = 0;
  uint64_t next_line_percent_ = 0;
  bool is_drawn_ = false;
};

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

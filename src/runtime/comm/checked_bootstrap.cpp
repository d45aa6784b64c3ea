// The checks around every all_gather() of the library's bootstraps.
#include "runtime/comm/checked_bootstrap.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/throw_error.h"
#include "runtime/comm/rank_groups.h"

namespace narrowfloat {

CheckedBootstrap::CheckedBootstrap(RankInfo info, Milliseconds deadline, std::string where)
    : Bootstrap(std::move(info), deadline), where_(std::move(where)) {}

void CheckedBootstrap::all_gather(std::span<const std::byte> mine, std::span<std::byte> all) {
  const auto ranks = static_cast<size_t>(size());
  if (all.size() / ranks != mine.size() || all.size() % ranks != 0) {
    throw_invalid("all_gather: all: expected {} bytes for each of {} ranks, got {} bytes",
                  mine.size(), ranks, all.size());
  }
  if (!failure_.empty()) {
    throw_error(ErrorKind::kDevice,
                "{}: an earlier call failed, so the ranks may be out of step; make a new bootstrap "
                "on all ranks. The earlier error: {}",
                where_, failure_);
  }
  if (ranks == 1) {
    std::copy(mine.begin(), mine.end(), all.begin());
    return;
  }
  ++call_;
  try {
    exchange(mine, all);
  } catch (const std::exception& error) {
    failure_ = error.what();
    announce_failure(failure_);
    throw;
  } catch (...) {
    failure_ = "an exception of an unknown type";
    announce_failure(failure_);
    throw;
  }
}

std::string CheckedBootstrap::place() const {
  const std::string step =
      call_ == 0 ? std::string("first meeting") : fmt::format("all_gather number {}", call_);
  return fmt::format("{}: rank {} of {}: {}", where_, rank(), size(), step);
}

void CheckedBootstrap::require_one_size(const std::vector<uint64_t>& sizes) const {
  std::vector<std::string> texts;
  texts.reserve(sizes.size());
  for (const uint64_t bytes : sizes) texts.push_back(fmt::format("{} bytes", bytes));
  const std::vector<RankGroup> groups = group_ranks(texts);
  if (groups.size() == 1) return;
  std::string list;
  for (const RankGroup& group : groups) {
    list +=
        fmt::format("{}{} from {}", list.empty() ? "" : ", ", group.text, name_ranks(group.ranks));
  }
  throw_invalid(
      "{}: expected messages of one length from all ranks, got {}; all ranks must make the same "
      "calls in the same order",
      place(), list);
}

std::span<std::byte> CheckedBootstrap::part(std::span<std::byte> all, int rank) const {
  const size_t bytes = all.size() / static_cast<size_t>(size());
  return all.subspan(static_cast<size_t>(rank) * bytes, bytes);
}

}  // namespace narrowfloat

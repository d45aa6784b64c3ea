// The base class: collectives on top of all_gather(), and the agreement of all ranks on success or
// one error.
#include "narrowfloat/bootstrap.h"

#include <algorithm>
#include <utility>

#include "base/throw_error.h"
#include "runtime/comm/rank_groups.h"

namespace narrowfloat {

Bootstrap::Bootstrap(RankInfo info, Milliseconds deadline)
    : info_(std::move(info)), deadline_(deadline) {
  if (info_.size < 1) throw_invalid("bootstrap: size: expected >= 1, got {}", info_.size);
  if (info_.rank < 0 || info_.rank >= info_.size) {
    throw_invalid("bootstrap: rank: expected 0 to {} (size - 1), got {}", info_.size - 1,
                  info_.rank);
  }
  if (info_.local_rank < 0) {
    throw_invalid("bootstrap: local_rank: expected >= 0, got {}", info_.local_rank);
  }
  if (deadline_.count() <= 0) {
    throw_invalid("bootstrap: deadline: expected > 0 ms, got {} ms", deadline_.count());
  }
}

Bootstrap::~Bootstrap() = default;

void Bootstrap::barrier() {
  const std::byte mine{1};
  std::vector<std::byte> all(static_cast<size_t>(size()));
  all_gather(std::span(&mine, 1), all);
}

void Bootstrap::broadcast(std::span<std::byte> data, int root) {
  if (root < 0 || root >= size()) {
    throw_invalid("broadcast: root: expected 0 to {} (size - 1), got {}", size() - 1, root);
  }
  std::vector<std::byte> all(data.size() * static_cast<size_t>(size()));
  all_gather(data, all);
  std::copy_n(all.begin() + static_cast<ptrdiff_t>(data.size()) * root, data.size(), data.begin());
}

std::vector<std::string> Bootstrap::gather_texts(const std::string& mine) {
  const uint64_t length = mine.size();
  std::vector<uint64_t> lengths(static_cast<size_t>(size()));
  all_gather(std::as_bytes(std::span(&length, 1)), std::as_writable_bytes(std::span(lengths)));
  const uint64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::string padded = mine;
  padded.resize(longest);
  std::string all(longest * lengths.size(), '\0');
  if (longest > 0) {
    all_gather(std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(all)));
  }
  std::vector<std::string> texts;
  texts.reserve(lengths.size());
  for (const uint64_t bytes : lengths) texts.push_back(all.substr(texts.size() * longest, bytes));
  return texts;
}

void Bootstrap::agree(const std::string& phase, const Error* error) {
  // A failed rank sends the digit of the kind and the message, others an empty text.
  const std::string mine =
      error == nullptr ? std::string()
                       : fmt::format("{}{}", static_cast<int>(error->kind()), error->what());
  std::vector<std::string> texts;
  try {
    texts = gather_texts(mine);
  } catch (const Error& lost) {
    if (error == nullptr) throw;
    throw_error(error->kind(), "{}: rank {} failed: {}\n  The other ranks could not be told: {}",
                phase, rank(), error->what(), lost.what());
  }
  std::string list;
  size_t failed = 0;
  ErrorKind kind{};
  for (const RankGroup& group : group_ranks(texts)) {
    if (group.text.empty()) continue;
    if (failed == 0) kind = static_cast<ErrorKind>(group.text.front() - '0');
    failed += group.ranks.size();
    list += fmt::format("\n  {}: {}", name_ranks(group.ranks), group.text.substr(1));
  }
  if (failed > 0) throw_error(kind, "{}: {} of {} ranks failed:{}", phase, failed, size(), list);
}

void Bootstrap::require_equal(const std::string& what, const std::string& mine) {
  const std::vector<RankGroup> groups = group_ranks(gather_texts(mine));
  if (groups.size() == 1) return;
  std::string list;
  for (const RankGroup& group : groups) {
    list += fmt::format("\n  {}: {}", name_ranks(group.ranks), group.text);
  }
  throw_invalid("{}: expected the same on all {} ranks, got:{}", what, size(), list);
}

}  // namespace narrowfloat

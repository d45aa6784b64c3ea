// A bootstrap over files in a directory that all ranks see. Files get their name by rename() when
// they are complete, so a reader never sees a part of one.
//
//   <job>.hello.<rank>              text: protocol, size, a random token of this rank
//   <job>.<session>.<call>.<rank>   the message of a rank in one call; call 0 is the meeting
//   <job>.<session>.through.<rank>  this rank has seen the messages of call 0
//   <job>.<session>.done.<rank>     this rank has ended
//   <job>.<session>.failed          text: a call has failed on some rank
//
// Meeting. The session is a hash of the tokens of all ranks. A rank reads the hello files of all,
// writes its message of call 0 under the session that follows, and is through once it sees the
// messages of all. Until then it looks for hello files that have changed, and starts a new session
// if one has. So the hello file of a crashed job with the same id does no harm: no running rank
// ever writes a message under a session that is made of its token. A rank ends the meeting when all
// are through: the next group of the job begins with other hello files of the same names.
//
// Removal. Who has finished call n knows that all others have finished call n - 1, and removes its
// message of n - 1, and with that of the meeting its through file. On destruction nobody waits: a
// rank writes its done file, and the last one, who sees all of them, removes the session's files.
// If a rank has died they stay: from each other rank a done file and its last one or two messages,
// and the file that says so.
#include "runtime/comm/file_bootstrap.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <optional>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "base/throw_error.h"
#include "runtime/comm/checked_bootstrap.h"
#include "runtime/comm/job_names.h"
#include "runtime/comm/rank_groups.h"
#include "runtime/comm/wait_deadline.h"

namespace narrowfloat {
namespace {

namespace fs = std::filesystem;

class OpenFile {
 public:
  OpenFile(const std::string& path, int flags)
      : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0600)) {}
  ~OpenFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void throw_file_error(const char* what, const std::string& path) {
  throw_error(ErrorKind::kIo, "bootstrap over files: cannot {} {}: {}", what, path,
              std::strerror(errno));
}

bool file_exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

// Several ranks may publish the same file; the last one counts.
void publish_file(const std::string& path, std::span<const std::byte> data, int rank) {
  const std::string partial = fmt::format("{}.{}.partial", path, rank);
  const OpenFile file(partial, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
  if (file.fd() < 0) throw_file_error("create", partial);
  while (!data.empty()) {
    const ssize_t written = ::write(file.fd(), data.data(), data.size());
    if (written < 0 && errno != EINTR) throw_file_error("write", partial);
    data = data.subspan(static_cast<size_t>(std::max<ssize_t>(written, 0)));
  }
  if (std::rename(partial.c_str(), path.c_str()) != 0) throw_file_error("rename", partial);
}

// Empty where there is no such file. ESTALE: a network file system has found that it was replaced.
std::optional<std::string> read_published_file(const std::string& path) {
  const auto fail = [&]() -> std::optional<std::string> {
    if (errno == ENOENT || errno == ESTALE) return std::nullopt;
    throw_file_error("read", path);
  };
  const OpenFile file(path, O_RDONLY);
  struct stat status {};
  if (file.fd() < 0 || ::fstat(file.fd(), &status) != 0) return fail();
  std::string text(static_cast<size_t>(status.st_size), '\0');
  for (size_t have = 0; have < text.size();) {
    const ssize_t count = ::read(file.fd(), text.data() + have, text.size() - have);
    if (count < 0 && errno != EINTR) return fail();
    if (count == 0) text.resize(have);
    have += static_cast<size_t>(std::max<ssize_t>(count, 0));
  }
  return text;
}

std::string hello_text(int size, const std::string& token) {
  return fmt::format("narrowfloat bootstrap 1\nsize {}\ntoken {}\n", size, token);
}

class FileBootstrap final : public CheckedBootstrap {
 public:
  FileBootstrap(std::string directory, const RankInfo& info, Milliseconds deadline,
                bool removes_directory)
      : CheckedBootstrap(info, deadline, "bootstrap over files in " + directory),
        directory_(std::move(directory)),
        job_(directory_ + "/" + job_file_name(info.job_id)),
        removes_directory_(removes_directory) {
    if (size() == 1) return;
    try {
      meet();
    } catch (...) {
      std::remove(hello_path(rank()).c_str());
      std::remove(message_path(0, rank()).c_str());
      std::remove(through_path(rank()).c_str());
      remove_directory();
      throw;
    }
    std::remove(hello_path(rank()).c_str());
  }

  ~FileBootstrap() override {
    if (size() > 1) {
      try {
        publish_file(done_path(rank()), {}, rank());
        remove_session_if_all_are_done();
      } catch (const std::exception&) {
        // The directory is gone or full: what could not be written or removed stays.
      }
    }
    remove_directory();
  }

 private:
  [[nodiscard]] std::string hello_path(int rank) const {
    return fmt::format("{}.hello.{}", job_, rank);
  }
  [[nodiscard]] std::string message_path(uint64_t call, int rank) const {
    return fmt::format("{}.{}.{}.{}", job_, session_, call, rank);
  }
  [[nodiscard]] std::string through_path(int rank) const {
    return fmt::format("{}.{}.through.{}", job_, session_, rank);
  }
  [[nodiscard]] std::string done_path(int rank) const {
    return fmt::format("{}.{}.done.{}", job_, session_, rank);
  }

  [[nodiscard]] std::string failed_path() const {
    return fmt::format("{}.{}.failed", job_, session_);
  }

  void meet() {
    const WaitDeadline limit(deadline());
    BackOff back_off = make_back_off();
    std::vector<std::string> tokens(static_cast<size_t>(size()));
    std::vector<std::string> strange_hellos(tokens.size());
    const std::string token = random_token();
    const std::string hello = hello_text(size(), token);
    publish_file(hello_path(rank()), std::as_bytes(std::span(hello)), rank());
    for (;;) {
      read_hellos(tokens, strange_hellos);
      tokens[static_cast<size_t>(rank())] = token;
      const std::vector<int> missing = missing_in_session(tokens);
      if (missing.empty()) break;
      if (limit.passed()) throw_not_met(missing, strange_hellos);
      back_off.sleep(limit);
    }
    publish_file(through_path(rank()), {}, rank());
    for (;;) {
      std::vector<int> missing;
      for (int r = 0; r < size(); ++r) {
        if (!file_exists(through_path(r))) missing.push_back(r);
      }
      if (missing.empty()) return;
      if (limit.passed()) throw_not_met(missing, strange_hellos);
      back_off.sleep(limit);
    }
  }

  // Keeps the token of a rank whose hello file is not there: it is through already.
  void read_hellos(std::vector<std::string>& tokens, std::vector<std::string>& strange) const {
    for (int r = 0; r < size(); ++r) {
      const std::optional<std::string> text = read_published_file(hello_path(r));
      if (!text) continue;
      const size_t token_at = hello_text(size(), "").size() - 1;
      const std::string token = text->size() > token_at ? text->substr(token_at, 16) : "";
      const bool fits = *text == hello_text(size(), token);
      (fits ? tokens : strange)[static_cast<size_t>(r)] = fits ? token : *text;
    }
  }

  // Enters the session of these tokens, if all are known. Returns the ranks that have not.
  std::vector<int> missing_in_session(const std::vector<std::string>& tokens) {
    std::vector<int> missing;
    std::string all_tokens;
    for (int r = 0; r < size(); ++r) {
      if (tokens[static_cast<size_t>(r)].empty()) missing.push_back(r);
      all_tokens += tokens[static_cast<size_t>(r)];
    }
    if (!missing.empty()) return missing;
    const std::string session = fmt::format("{:016x}", hash_text(all_tokens));
    if (session != session_) {
      if (!session_.empty()) std::remove(message_path(0, rank()).c_str());
      session_ = session;
      publish_file(message_path(0, rank()), {}, rank());
    }
    for (int r = 0; r < size(); ++r) {
      if (!file_exists(message_path(0, r))) missing.push_back(r);
    }
    return missing;
  }

  [[noreturn]] void throw_not_met(const std::vector<int>& missing,
                                  const std::vector<std::string>& strange_hellos) const {
    std::string strange;
    for (const int r : missing) {
      std::string text = strange_hellos[static_cast<size_t>(r)];
      if (text.empty()) continue;
      std::replace(text.begin(), text.end(), '\n', ' ');
      strange += fmt::format("; the file of rank {} has \"{}\", expected size {}", r,
                             text.substr(0, 80), size());
    }
    throw_error(
        ErrorKind::kDevice,
        "{}: waited {} ms for {}, which did not come{}; check that all ranks are alive, see "
        "this directory and have the job id \"{}\"",
        place(), deadline().count(), name_ranks(missing), strange, info().job_id);
  }

  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) override {
    const WaitDeadline limit(deadline());
    BackOff back_off = make_back_off();
    publish_file(message_path(call(), rank()), mine, rank());
    std::vector<uint64_t> sizes(static_cast<size_t>(size()), mine.size());
    std::copy(mine.begin(), mine.end(), part(all, rank()).begin());
    std::vector<int> missing;
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) missing.push_back(r);
    }
    for (;;) {
      // In this order: a rank that has failed since all messages came fails in the same way here.
      const std::optional<std::string> failure = read_published_file(failed_path());
      std::erase_if(missing, [&](int r) {
        return read_message(r, part(all, r), sizes[static_cast<size_t>(r)]);
      });
      if (missing.empty()) break;
      if (failure) throw_failed_elsewhere(*failure);
      if (limit.passed()) {
        throw_error(ErrorKind::kDevice,
                    "{}: waited {} ms for the message of {}; check that all ranks are alive and "
                    "make the same calls",
                    place(), deadline().count(), name_ranks(missing));
      }
      back_off.sleep(limit);
    }
    require_one_size(sizes);
    // A late rank finds all messages of ranks that have given up.
    const std::optional<std::string> failure = read_published_file(failed_path());
    if (failure) throw_failed_elsewhere(*failure);
    std::remove(message_path(call() - 1, rank()).c_str());
    if (call() == 1) std::remove(through_path(rank()).c_str());
  }

  [[noreturn]] void throw_failed_elsewhere(const std::string& failure) const {
    throw_error(ErrorKind::kDevice, "{}: another rank has failed: {}", place(), failure);
  }

  void announce_failure(const std::string& what) override {
    try {
      publish_file(failed_path(), std::as_bytes(std::span(what)), rank());
    } catch (const Error&) {
      // The directory is gone or full: the others find out by their own deadlines.
    }
  }

  // Returns whether the message is there. Copies it if it has the expected size.
  bool read_message(int r, std::span<std::byte> into, uint64_t& bytes) const {
    // In this order, since a rank may write its message and end between the two looks.
    const bool ended = file_exists(done_path(r));
    const std::optional<std::string> message = read_published_file(message_path(call(), r));
    if (!message) {
      if (!ended) return false;
      throw_error(ErrorKind::kDevice, "{}: rank {} has ended and takes no part; see its own error",
                  place(), r);
    }
    bytes = message->size();
    const std::span<const std::byte> data = std::as_bytes(std::span(*message));
    if (data.size() == into.size()) std::copy(data.begin(), data.end(), into.begin());
    return true;
  }

  void remove_session_if_all_are_done() const {
    for (int r = 0; r < size(); ++r) {
      if (!file_exists(done_path(r))) return;
    }
    const std::string prefix = fs::path(job_).filename().string() + "." + session_ + ".";
    std::vector<fs::path> files;
    for (const fs::directory_entry& entry : fs::directory_iterator(directory_)) {
      if (entry.path().filename().string().starts_with(prefix)) files.push_back(entry.path());
    }
    for (const fs::path& file : files) std::remove(file.c_str());
  }

  // Does nothing while another rank's files are in it.
  void remove_directory() const {
    if (removes_directory_) ::rmdir(directory_.c_str());
  }

  static BackOff make_back_off() {
    return {std::chrono::milliseconds(1), std::chrono::milliseconds(20)};
  }

  std::string directory_;
  std::string job_;  // How the paths of all its files begin.
  std::string session_;
  bool removes_directory_;
};

}  // namespace

std::unique_ptr<Bootstrap> make_file_bootstrap(const std::string& directory, const RankInfo& info,
                                               Bootstrap::Milliseconds deadline) {
  struct stat status {};
  if (::stat(directory.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) {
    throw_error(ErrorKind::kIo,
                "make_file_bootstrap: directory: expected a directory that all ranks see, got "
                "\"{}\", which is none; make it before the ranks start",
                directory);
  }
  return std::make_unique<FileBootstrap>(directory, info, deadline, false);
}

std::unique_ptr<Bootstrap> make_job_file_bootstrap(const std::string& parent, const RankInfo& info,
                                                   Bootstrap::Milliseconds deadline) {
  const std::string directory =
      fmt::format("{}/narrowfloat-{}-{}", parent, ::geteuid(), job_file_name(info.job_id));
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    throw_file_error("make the directory", directory);
  }
  struct stat status {};
  if (::lstat(directory.c_str(), &status) != 0) throw_file_error("use the directory", directory);
  if (!S_ISDIR(status.st_mode) || status.st_uid != ::geteuid()) {
    throw_error(
        ErrorKind::kIo,
        "bootstrap over files: expected {} to be a directory of this user, which it is not; "
        "set NARROWFLOAT_RENDEZVOUS to another directory",
        directory);
  }
  return std::make_unique<FileBootstrap>(directory, info, deadline, true);
}

}  // namespace narrowfloat

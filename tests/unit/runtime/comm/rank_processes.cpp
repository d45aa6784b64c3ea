// Ranks of a group as forked processes or as threads.
#include "unit/runtime/comm/rank_processes.h"

#include <stdexcept>
#include <sys/socket.h>
#include <unistd.h>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include "narrowfloat/error.h"
#include "support/temp_dir.h"

namespace narrowfloat::testing {
void expect_contains(const std::string& text, const std::vector<std::string>& fragments) {
  for (const std::string& fragment : fragments) {
    EXPECT_NE(text.find(fragment), std::string::npos) << "no \"" << fragment << "\" in: " << text;
  }
}

RankInfo place_in_job(int rank, int size, const std::string& job_id) {
  return {.rank = rank, .size = size, .local_rank = rank, .job_id = job_id};
}

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  const bool bound = ::bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  ::close(fd);
  if (!bound) throw std::runtime_error("no free port");
  return ntohs(address.sin_port);
}

namespace {

RankInfo info_of(int rank, int size) { return place_in_job(rank, size, "test job"); }

class FileMeeting final : public Meeting {
 public:
  explicit FileMeeting(int size) : size_(size) {}
  std::unique_ptr<Bootstrap> bootstrap(int rank, Bootstrap::Milliseconds deadline) override {
    return make_file_bootstrap(directory_.path(), info_of(rank, size_), deadline);
  }

 private:
  int size_;
  TempDir directory_;
};

class TcpMeeting : public Meeting {
 public:
  explicit TcpMeeting(int size) : size_(size), port_(free_port()) {}
  std::unique_ptr<Bootstrap> bootstrap(int rank, Bootstrap::Milliseconds deadline) override {
    return make_tcp_bootstrap("127.0.0.1", port_, info_of(rank, size_), deadline);
  }

 private:
  int size_;
  int port_;
};

class SharedMeeting : public Meeting {
 public:
  explicit SharedMeeting(int size) : rendezvous_(size) {}
  std::unique_ptr<Bootstrap> bootstrap(int rank, Bootstrap::Milliseconds deadline) override {
    return rendezvous_.bootstrap(rank, deadline);
  }

 private:
  SharedRendezvous rendezvous_;
};

// The function is another bootstrap.
class CallbackMeeting final : public SharedMeeting {
 public:
  explicit CallbackMeeting(int size) : SharedMeeting(size), size_(size) {}
  std::unique_ptr<Bootstrap> bootstrap(int rank, Bootstrap::Milliseconds deadline) override {
    const std::shared_ptr<Bootstrap> inner = SharedMeeting::bootstrap(rank, deadline);
    return make_callback_bootstrap(info_of(rank, size_),
                                   [inner](auto mine, auto all) { inner->all_gather(mine, all); });
  }

 private:
  int size_;
};

template <typename Base>
class InThreads final : public Base {
 public:
  using Base::Base;
  std::vector<std::string> run(int ranks, const std::function<std::string(int)>& body) override {
    return run_threads(ranks, body);
  }
};

}  // namespace

std::unique_ptr<Meeting> make_meeting(const std::string& kind, int ranks) {
  if (kind == "file") return std::make_unique<FileMeeting>(ranks);
  if (kind == "tcp") return std::make_unique<TcpMeeting>(ranks);
  if (kind == "shared") return std::make_unique<SharedMeeting>(ranks);
  if (kind == "callback") return std::make_unique<CallbackMeeting>(ranks);
  if (kind == "threads") return std::make_unique<InThreads<SharedMeeting>>(ranks);
  if (kind == "tcp_threads") return std::make_unique<InThreads<TcpMeeting>>(ranks);
  throw std::invalid_argument(kind);
}

}  // namespace narrowfloat::testing

// Peers that the TCP bootstrap has to refuse, and addresses.
#include <stdexcept>
#include <string_view>
#include <sys/socket.h>
#include <thread>

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include "narrowfloat/bootstrap.h"
#include "narrowfloat/error.h"
#include "runtime/comm/tcp_connection.h"
#include "support/expect_error.h"
#include "unit/runtime/comm/rank_processes.h"

namespace narrowfloat::testing {
namespace {

using std::chrono::milliseconds;

std::string barrier_error(const std::string& host, int port, const RankInfo& info,
                          milliseconds deadline = kLongDeadline) {
  return error_of([&] { make_tcp_bootstrap(host, port, info, deadline)->barrier(); });
}

sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// Tries until somebody listens.
Socket connect_client(int port) {
  const sockaddr_in address = loopback(port);
  for (;;) {
    Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
    if (::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
      return socket;
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
}

// Ranks that rank 0 has let in first connect again while it still answers the others.
TEST(TcpBootstrap, GroupsOfAJobFollowEachOtherAtOnce) {
  const int port = free_port();
  const std::vector<std::string> results = run_processes(4, [&](int rank) {
    std::vector<std::unique_ptr<Bootstrap>> groups;
    for (int group = 0; group < 8; ++group) {
      groups.push_back(
          make_tcp_bootstrap("127.0.0.1", port, place_in_job(rank, 4, "a"), kLongDeadline));
    }
    std::string all;
    for (const auto& group : groups) {
      for (const std::string& text : group->gather_texts(std::to_string(rank))) all += text;
    }
    return all;
  });
  for (const std::string& result : results) EXPECT_EQ(result, "01230123012301230123012301230123");
}

TEST(TcpBootstrap, RefusesAnotherJobAnotherSizeAndATakenRank) {
  const int port = free_port();
  // Rank 2 comes last, when the others are refused already.
  const std::vector<RankInfo> places = {place_in_job(0, 3, "ours"), place_in_job(1, 3, "ours"),
                                        place_in_job(2, 3, "ours"), place_in_job(1, 3, "theirs"),
                                        place_in_job(2, 4, "ours"), place_in_job(1, 3, "ours")};
  const std::vector<std::string> results =
      run_processes(static_cast<int>(places.size()), [&](int process) {
        if (process == 2) std::this_thread::sleep_for(milliseconds(400));
        if (process == 5) std::this_thread::sleep_for(milliseconds(100));
        return barrier_error("127.0.0.1", port, places[static_cast<size_t>(process)]);
      });
  for (size_t process = 0; process < 3; ++process) EXPECT_EQ(results[process], "");
  expect_contains(results[3], {"invalid argument", "refused", "\"ours\"", "\"theirs\""});
  expect_contains(results[4], {"invalid argument", "refused", "size: expected 3", "got 4"});
  expect_contains(results[5], {"invalid argument", "refused", "two processes", "rank 1"});
}

TEST(TcpBootstrap, SaysWhomItRefusedWhenTimeIsOver) {
  const int port = free_port();
  const std::vector<std::string> results = run_processes(2, [&](int rank) {
    return barrier_error("127.0.0.1", port, place_in_job(rank, rank == 0 ? 2 : 3, ""),
                         milliseconds(200));
  });
  expect_contains(results[0], {"device error", "waited 200 ms for rank 1", "size: expected 2"});
}

TEST(TcpBootstrap, MeetsDespiteSilentAndForeignClients) {
  const int port = free_port();
  const std::vector<std::string> results = run_processes(4, [&](int process) -> std::string {
    if (process == 2) {
      const Socket silent = connect_client(port);
      std::this_thread::sleep_for(milliseconds(200));
      return "";
    }
    if (process == 3) {
      const Socket foreign = connect_client(port);
      constexpr std::string_view kRequest = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
      ::send(foreign.fd(), kRequest.data(), kRequest.size(), MSG_NOSIGNAL);
      char byte = 0;
      return ::recv(foreign.fd(), &byte, 1, 0) <= 0 ? "" : "it answered";
    }
    if (process == 1) std::this_thread::sleep_for(milliseconds(100));
    return barrier_error("127.0.0.1", port, place_in_job(process, 2, "a"));
  });
  for (const std::string& result : results) EXPECT_EQ(result, "");
}

TEST(TcpBootstrap, RefusesAnotherService) {
  const int port = free_port();
  const std::vector<std::string> results = run_processes(2, [&](int process) -> std::string {
    if (process == 1) return barrier_error("127.0.0.1", port, place_in_job(1, 2, "a"));
    const Socket listener(::socket(AF_INET, SOCK_STREAM, 0));
    const sockaddr_in address = loopback(port);
    ::bind(listener.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
    ::listen(listener.fd(), 1);
    const Socket peer(::accept(listener.fd(), nullptr, nullptr));
    constexpr std::string_view kBanner = "SSH-2.0-another_service\r\n";
    ::send(peer.fd(), kBanner.data(), kBanner.size(), MSG_NOSIGNAL);
    char byte = 0;
    while (::recv(peer.fd(), &byte, 1, 0) > 0) {
    }
    return "";
  });
  expect_contains(results[1], {"invalid argument", "another service uses this port"});
}

TEST(TcpBootstrap, NamesRankZeroWhereNobodyListens) {
  const std::string error =
      barrier_error("127.0.0.1", free_port(), place_in_job(1, 2, "a"), milliseconds(100));
  expect_contains(error, {"device error", "waited 100 ms for rank 0 to listen", "refused"});
}

TEST(TcpBootstrap, SaysThatThePortIsInUse) {
  const int port = free_port();
  const Socket other(::socket(AF_INET, SOCK_STREAM, 0));
  const sockaddr_in address = loopback(port);
  ASSERT_EQ(::bind(other.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::listen(other.fd(), 1), 0);
  expect_contains(barrier_error("127.0.0.1", port, place_in_job(0, 2, "a")),
                  {"I/O error", "cannot listen on 127.0.0.1:" + std::to_string(port), "in use"});
}

TEST(TcpBootstrap, MeetsAtLocalhostAndOnAllInterfaces) {
  for (const std::string host : {"localhost", "0.0.0.0"}) {
    const int port = free_port();
    const std::vector<std::string> results = run_processes(
        2, [&](int rank) { return barrier_error(host, port, place_in_job(rank, 2, "a")); });
    for (const std::string& result : results) EXPECT_EQ(result, "") << host;
  }
}

TEST(TcpBootstrap, RefusesAddressesThatCannotBe) {
  expect_error(kInvalid, {"host"}, [] { static_cast<void>(make_tcp_bootstrap("", 1, {})); });
  for (const int port : {0, -1, 65536}) {
    expect_error(kInvalid, {"port", "1 to 65535", std::to_string(port)},
                 [&] { static_cast<void>(make_tcp_bootstrap("localhost", port, {})); });
  }
}

// Two connected ends.
struct Pair {
  Socket first;
  Socket second;
};
Pair connected_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0) throw std::runtime_error("socketpair");
  return {Socket(fds[0]), Socket(fds[1])};
}

TEST(Connection, DropsPayloadsAboveItsLimitAndKeepsTheNextFrame) {
  Pair pair = connected_pair();
  Connection sender(std::move(pair.first));
  Connection receiver(std::move(pair.second));
  receiver.set_payload_limit(10'000);
  sender.send(FrameType::kMessage, std::vector<std::byte>(10'001));
  sender.send(FrameType::kResult, std::vector<std::byte>(10'000, std::byte{7}));
  std::vector<Frame> frames;
  while (frames.size() < 2) {
    sender.flush();
    if (auto frame = receiver.receive()) frames.push_back(std::move(*frame));
  }
  EXPECT_EQ(frames[0].length, 10'001U);
  EXPECT_TRUE(frames[0].payload.empty());
  EXPECT_EQ(frames[1].type, FrameType::kResult);
  EXPECT_EQ(frames[1].payload, std::vector<std::byte>(10'000, std::byte{7}));
  EXPECT_FALSE(receiver.receive().has_value());
  EXPECT_FALSE(receiver.is_closed());
}

TEST(Connection, GivesWhatWasSentBeforeTheEnd) {
  Pair pair = connected_pair();
  Connection receiver(std::move(pair.second));
  {
    Connection sender(std::move(pair.first));
    sender.send(FrameType::kWelcome, {});
  }
  receiver.send(FrameType::kHello, std::vector<std::byte>(100));  // Raises no SIGPIPE.
  EXPECT_FALSE(receiver.has_unsent());
  const std::optional<Frame> frame = receiver.receive();
  ASSERT_TRUE(frame.has_value());
  EXPECT_EQ(frame->type, FrameType::kWelcome);
  EXPECT_FALSE(receiver.is_closed());
  EXPECT_FALSE(receiver.receive().has_value());
  EXPECT_TRUE(receiver.is_closed());
  EXPECT_FALSE(receiver.is_foreign());
}

}  // namespace
}  // namespace narrowfloat::testing

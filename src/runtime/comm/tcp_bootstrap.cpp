// A bootstrap over TCP connections between rank 0 and each other rank (frames: tcp_connection.h).
//
// Meeting: a rank connects and sends kHello; rank 0 answers kError and closes if the job id, size
// or rank is wrong or taken, else kWaiting, and kWelcome once all have come. all_gather: kMessage
// to rank 0, kResult back. While rank 0 waits it tells the ranks that have come for whom
// (kWaiting), so whose deadline ends first can name the missing rank. A rank that fails sends
// kError and closes its connection; rank 0 passes errors and lost connections on to all.
#include <algorithm>
#include <list>
#include <optional>
#include <utility>

#include "base/throw_error.h"
#include "runtime/comm/checked_bootstrap.h"
#include "runtime/comm/rank_groups.h"
#include "runtime/comm/tcp_address.h"
#include "runtime/comm/tcp_connection.h"
#include "runtime/comm/wait_deadline.h"

namespace narrowfloat {
namespace {

constexpr uint32_t kProtocol = 1;
constexpr uint64_t kMaxTextBytes = 65536;

[[noreturn]] void throw_received(const Frame& error) {
  if (error.payload.size() < 4) {
    throw_error(ErrorKind::kDevice, "bootstrap over TCP: a peer has sent an error without a text");
  }
  const auto kind = static_cast<ErrorKind>(read_u32(error.payload, 0));
  const bool is_known = kind >= ErrorKind::kInvalidArgument && kind <= ErrorKind::kDevice;
  throw Error(is_known ? kind : ErrorKind::kDevice, read_text(error.payload, 4));
}

std::vector<std::byte> error_payload(ErrorKind kind, const std::string& text) {
  std::vector<std::byte> payload;
  append_u32(payload, static_cast<uint32_t>(kind));
  append_text(payload, text.substr(0, kMaxTextBytes - 4));
  return payload;
}

// Tells every eighth of the deadline that it is time to say who is waited for.
class WaitingTimer {
 public:
  explicit WaitingTimer(std::chrono::milliseconds deadline)
      : period_(std::max(deadline / 8, std::chrono::milliseconds(1))) {}
  [[nodiscard]] std::chrono::milliseconds period() const { return period_; }
  bool is_due() {
    const auto now = WaitDeadline::Clock::now();
    if (now < next_) return false;
    next_ = now + period_;
    return true;
  }

 private:
  std::chrono::milliseconds period_;
  WaitDeadline::Clock::time_point next_;
};

class TcpBootstrap final : public CheckedBootstrap {
 public:
  TcpBootstrap(std::string host, int port, const RankInfo& info, Milliseconds deadline)
      : CheckedBootstrap(info, deadline, fmt::format("bootstrap over TCP at {}:{}", host, port)),
        host_(std::move(host)),
        port_(port),
        peers_(static_cast<size_t>(size())) {
    if (size() == 1) return;
    telling_peers([&] { rank() == 0 ? accept_ranks() : join(); });
  }

 private:
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) override {
    telling_peers([&] { rank() == 0 ? gather_as_root(mine, all) : gather_as_peer(mine, all); });
  }

  template <typename Body>
  void telling_peers(const Body& body) {
    try {
      body();
    } catch (const Error& error) {
      const std::vector<std::byte> payload = error_payload(error.kind(), error.what());
      for (Connection* peer : connected()) peer->send(FrameType::kError, payload);
      // Best effort: a peer that does not read finds out by its own deadline.
      flush_all(WaitDeadline(std::min(deadline(), Milliseconds(1000))));
      for (std::optional<Connection>& peer : peers_) peer.reset();
      throw;
    }
  }

  // --- both sides ---

  [[nodiscard]] Connection& peer(int r) { return *peers_[static_cast<size_t>(r)]; }

  std::vector<Connection*> connected() {
    std::vector<Connection*> connections;
    for (std::optional<Connection>& peer : peers_) {
      if (peer) connections.push_back(&*peer);
    }
    return connections;
  }

  // Returns whether all is sent.
  bool flush_all(const WaitDeadline& limit) {
    for (;;) {
      std::vector<Connection*> unsent = connected();
      std::erase_if(unsent, [](const Connection* c) { return !c->has_unsent(); });
      if (unsent.empty()) return true;
      if (limit.passed()) return false;
      wait_until_sendable(unsent, limit.poll_timeout(deadline()));
    }
  }

  [[noreturn]] void throw_late(const std::string& whom, const std::string& details) const {
    throw_error(ErrorKind::kDevice,
                "{}: waited {} ms for {}{}; check that all ranks are alive and make the same calls",
                place(), deadline().count(), whom, details);
  }

  [[noreturn]] void throw_lost(int r, const std::string& reason) const {
    throw_error(ErrorKind::kDevice,
                "{}: lost rank {}: {}; its process has ended or failed, see its own error", place(),
                r, reason);
  }

  // --- rank 0 ---

  void accept_ranks() {
    const WaitDeadline limit(deadline());
    const std::vector<Socket> listeners = listen_on(host_, port_, size() + 16);
    std::vector<int> listener_fds;
    listener_fds.reserve(listeners.size());
    for (const Socket& listener : listeners) listener_fds.push_back(listener.fd());
    std::list<Connection> newcomers;
    std::string refused;
    WaitingTimer timer(deadline());
    for (std::vector<int> missing = not_connected(); !missing.empty(); missing = not_connected()) {
      if (limit.passed()) throw_late(name_ranks(missing), refused);
      std::vector<Connection*> waited_for = connected();
      for (Connection& newcomer : newcomers) waited_for.push_back(&newcomer);
      wait_for_connections(waited_for, listener_fds, limit.poll_timeout(timer.period()));
      for (const int listener : listener_fds) {
        for (Socket socket = accept_from(listener); socket.is_open();
             socket = accept_from(listener)) {
          newcomers.emplace_back(std::move(socket));
        }
      }
      newcomers.remove_if([&](Connection& newcomer) { return is_settled(newcomer, refused); });
      for (int r = 1; r < size(); ++r) {
        if (peers_[static_cast<size_t>(r)]) require_silence(r);
      }
      if (timer.is_due()) tell_waiting(not_connected());
    }
    for (Connection* peer : connected()) peer->send(FrameType::kWelcome, {});
    if (!flush_all(limit)) throw_late("ranks that do not read", "");
  }

  std::vector<int> not_connected() const {
    std::vector<int> missing;
    for (int r = 1; r < size(); ++r) {
      if (!peers_[static_cast<size_t>(r)]) missing.push_back(r);
    }
    return missing;
  }

  // Returns whether a new connection has become a peer, was refused, or is gone.
  bool is_settled(Connection& newcomer, std::string& refused) {
    const std::optional<Frame> hello = newcomer.receive();
    if (!hello) {
      if (newcomer.is_foreign()) refused += "; refused a connection of another protocol";
      return newcomer.is_closed();
    }
    const std::string fault = fault_of(*hello);
    if (fault.empty()) {
      const auto r = read_u32(hello->payload, 8);
      newcomer.set_payload_limit(kMaxTextBytes);
      peers_[r].emplace(std::move(newcomer));
      peers_[r]->send(FrameType::kWaiting, waiting_payload(not_connected()));
      return true;
    }
    newcomer.send(FrameType::kError,
                  error_payload(ErrorKind::kInvalidArgument,
                                fmt::format("{}: refused a connection: {}", place(), fault)));
    if (refused.size() < 500) refused += "; refused a connection: " + fault;
    return true;
  }

  // Why a kHello is refused; empty if it is not.
  [[nodiscard]] std::string fault_of(const Frame& hello) const {
    if (hello.type != FrameType::kHello || hello.payload.size() < 12) {
      return "it does not begin with a greeting of this protocol";
    }
    const uint32_t protocol = read_u32(hello.payload, 0);
    const uint32_t its_size = read_u32(hello.payload, 4);
    const uint32_t its_rank = read_u32(hello.payload, 8);
    const std::string job_id = read_text(hello.payload, 12);
    if (protocol != kProtocol) {
      return fmt::format(
          "protocol: expected {}, got {}; all ranks need the same version of the "
          "library",
          kProtocol, protocol);
    }
    if (job_id != info().job_id) {
      return fmt::format("job id: expected \"{}\", got \"{}\"; another job uses this port",
                         info().job_id, job_id);
    }
    if (its_size != static_cast<uint32_t>(size())) {
      return fmt::format("size: expected {} as on rank 0, got {} on rank {}", size(), its_size,
                         its_rank);
    }
    if (its_rank == 0 || its_rank >= its_size) {
      return fmt::format("rank: expected 1 to {}, got {}", size() - 1, its_rank);
    }
    if (peers_[its_rank]) {
      return fmt::format("rank: two processes say that they are rank {}", its_rank);
    }
    return {};
  }

  static std::vector<std::byte> waiting_payload(const std::vector<int>& missing) {
    std::vector<std::byte> payload;
    append_text(payload, missing.empty() ? std::string("rank 0") : name_ranks(missing));
    return payload;
  }

  // Ranks that are missing may read this much later, when it would be wrong.
  void tell_waiting(const std::vector<int>& missing) {
    for (int r = 1; r < size(); ++r) {
      if (peers_[static_cast<size_t>(r)] &&
          !std::binary_search(missing.begin(), missing.end(), r)) {
        peer(r).send(FrameType::kWaiting, waiting_payload(missing));
      }
    }
  }

  // A rank that waits for an answer sends nothing but an error.
  void require_silence(int r) {
    const std::optional<Frame> frame = peer(r).receive();
    if (peer(r).is_closed()) throw_lost(r, peer(r).close_reason());
    if (!frame) return;
    if (frame->type == FrameType::kError) throw_received(*frame);
    throw_lost(r, "it has sent a message that nobody waits for");
  }

  void gather_as_root(std::span<const std::byte> mine, std::span<std::byte> all) {
    const WaitDeadline limit(deadline());
    WaitingTimer timer(deadline());
    std::vector<uint64_t> sizes(static_cast<size_t>(size()), mine.size());
    std::copy(mine.begin(), mine.end(), part(all, 0).begin());
    std::vector<int> missing;
    for (int r = 1; r < size(); ++r) {
      missing.push_back(r);
      peer(r).set_payload_limit(std::max<uint64_t>(mine.size(), kMaxTextBytes));
    }
    for (;;) {
      std::erase_if(missing, [&](int r) {
        return take_message(r, part(all, r), sizes[static_cast<size_t>(r)]);
      });
      for (int r = 1; r < size(); ++r) {
        if (!std::binary_search(missing.begin(), missing.end(), r)) require_silence(r);
      }
      if (missing.empty()) break;
      if (limit.passed()) throw_late("the message of " + name_ranks(missing), "");
      if (timer.is_due()) tell_waiting(missing);
      wait_for_connections(connected(), {}, limit.poll_timeout(timer.period()));
    }
    require_one_size(sizes);
    for (Connection* peer : connected()) peer->send(FrameType::kResult, all);
    if (!flush_all(limit)) {
      std::vector<int> unsent;
      for (int r = 1; r < size(); ++r) {
        if (peer(r).has_unsent()) unsent.push_back(r);
      }
      throw_late(name_ranks(unsent) + " to take the result", "");
    }
  }

  // Returns whether the message is there. Copies it if it has the expected size.
  bool take_message(int r, std::span<std::byte> into, uint64_t& bytes) {
    const std::optional<Frame> frame = peer(r).receive();
    if (!frame) {
      if (peer(r).is_closed()) throw_lost(r, peer(r).close_reason());
      return false;
    }
    if (frame->type == FrameType::kError) throw_received(*frame);
    if (frame->type != FrameType::kMessage) throw_lost(r, "it has sent a frame of a wrong type");
    bytes = frame->length;
    if (bytes == into.size()) {
      std::copy(frame->payload.begin(), frame->payload.end(), into.begin());
    }
    return true;
  }

  // --- ranks above 0 ---

  void join() {
    const WaitDeadline limit(deadline());
    BackOff back_off(std::chrono::milliseconds(1), std::chrono::milliseconds(100));
    std::string reason;
    while (!try_to_join(limit, reason)) {
      if (limit.passed()) throw_late("rank 0 to listen", "; the last attempt: " + reason);
      back_off.sleep(limit);
    }
    wait_for_answer(FrameType::kWelcome, limit);
  }

  // Returns whether rank 0 has taken this rank.
  bool try_to_join(const WaitDeadline& limit, std::string& reason) {
    Socket socket = connect_to(host_, port_, limit, reason);
    if (!socket.is_open()) return false;
    Connection root(std::move(socket));
    root.set_payload_limit(kMaxTextBytes);
    std::vector<std::byte> hello;
    append_u32(hello, kProtocol);
    append_u32(hello, static_cast<uint32_t>(size()));
    append_u32(hello, static_cast<uint32_t>(rank()));
    append_text(hello, info().job_id);
    root.send(FrameType::kHello, hello);
    reason = "rank 0 took the connection and did not answer";
    Connection* const waited_for = &root;
    while (!limit.passed()) {
      if (const std::optional<Frame> frame = root.receive()) {
        if (frame->type == FrameType::kError) throw_received(*frame);
        waiting_ = read_text(frame->payload, 0);
        peers_[0].emplace(std::move(root));
        return true;
      }
      if (root.is_foreign()) {
        throw_invalid("{}: another service uses this port: {}; choose another one", place(),
                      root.close_reason());
      }
      if (root.is_closed()) {
        reason = root.close_reason();
        return false;
      }
      wait_for_connections(std::span(&waited_for, 1), {}, limit.poll_timeout(deadline()));
    }
    return false;
  }

  Frame wait_for_answer(FrameType type, const WaitDeadline& limit) {
    for (;;) {
      while (std::optional<Frame> frame = peer(0).receive()) {
        if (frame->type == type) return std::move(*frame);
        if (frame->type == FrameType::kError) throw_received(*frame);
        if (frame->type != FrameType::kWaiting) {
          throw_lost(0, "it has sent a frame of a wrong type");
        }
        waiting_ = read_text(frame->payload, 0);
      }
      if (peer(0).is_closed()) throw_lost(0, peer(0).close_reason());
      if (limit.passed()) {
        throw_late(waiting_.empty() ? std::string("rank 0") : waiting_,
                   waiting_.empty() ? ", which has not answered" : ", as rank 0 says");
      }
      wait_for_connections(connected(), {}, limit.poll_timeout(deadline()));
    }
  }

  void gather_as_peer(std::span<const std::byte> mine, std::span<std::byte> all) {
    const WaitDeadline limit(deadline());
    waiting_.clear();
    peer(0).set_payload_limit(std::max<uint64_t>(all.size(), kMaxTextBytes));
    peer(0).send(FrameType::kMessage, mine);
    const Frame result = wait_for_answer(FrameType::kResult, limit);
    if (result.length != all.size()) throw_lost(0, "its result has a wrong size");
    std::copy(result.payload.begin(), result.payload.end(), all.begin());
  }

  std::string host_;
  int port_;
  // On rank 0: the connection of each other rank. On others: that to rank 0 alone, in peers_[0].
  std::vector<std::optional<Connection>> peers_;
  std::string waiting_;  // Whom rank 0 has said to wait for.
};

}  // namespace

std::unique_ptr<Bootstrap> make_tcp_bootstrap(const std::string& host, int port,
                                              const RankInfo& info,
                                              Bootstrap::Milliseconds deadline) {
  if (host.empty()) {
    throw_invalid(
        "make_tcp_bootstrap: host: expected the name or address of the host of rank 0, "
        "got an empty text");
  }
  if (port < 1 || port > 65535) {
    throw_invalid("make_tcp_bootstrap: port: expected 1 to 65535, got {}", port);
  }
  return std::make_unique<TcpBootstrap>(host, port, info, deadline);
}

}  // namespace narrowfloat

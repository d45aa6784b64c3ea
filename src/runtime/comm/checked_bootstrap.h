// The base of the library's bootstraps. all_gather() checks its arguments, counts the calls, needs
// no transport for one rank, and refuses every call after one that failed, since the ranks may be
// out of step by then.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "narrowfloat/bootstrap.h"

namespace narrowfloat {

class CheckedBootstrap : public Bootstrap {
 public:
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) final;

 protected:
  // `where` opens every message: "bootstrap over files in /scratch/job".
  CheckedBootstrap(RankInfo info, Milliseconds deadline, std::string where);

  // 1 for the first call of all_gather(), 0 before it.
  [[nodiscard]] uint64_t call() const { return call_; }
  // How messages say where and when: "<where>: rank 1 of 4: all_gather number 3".
  [[nodiscard]] std::string place() const;
  // Throws kInvalidArgument unless all ranks have announced messages of one size.
  void require_one_size(const std::vector<uint64_t>& sizes) const;
  // The part of `all` that belongs to a rank.
  [[nodiscard]] std::span<std::byte> part(std::span<std::byte> all, int rank) const;

 private:
  // all_gather() for two ranks or more, with sizes that fit each other.
  virtual void exchange(std::span<const std::byte> mine, std::span<std::byte> all) = 0;
  // Lets other ranks know that exchange() has thrown, so that they need not wait for this one.
  virtual void announce_failure(const std::string& /*what*/) {}

  std::string where_;
  std::string failure_;
  uint64_t call_ = 0;
};

}  // namespace narrowfloat

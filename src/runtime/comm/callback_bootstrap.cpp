// A bootstrap over a function of the caller. The sizes are gathered first: what MPI_Allgather or a
// gather of torch.distributed do with messages of different lengths is undefined.
#include <utility>

#include "base/throw_error.h"
#include "runtime/comm/checked_bootstrap.h"

namespace narrowfloat {
namespace {

class CallbackBootstrap final : public CheckedBootstrap {
 public:
  CallbackBootstrap(const RankInfo& info, GatherFunction gather)
      : CheckedBootstrap(info, kDefaultDeadline, "bootstrap over a function"),
        gather_(std::move(gather)) {}

 private:
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) override {
    const uint64_t bytes = mine.size();
    std::vector<uint64_t> sizes(static_cast<size_t>(size()));
    gather_(std::as_bytes(std::span(&bytes, 1)), std::as_writable_bytes(std::span(sizes)));
    require_one_size(sizes);
    if (!mine.empty()) gather_(mine, all);
  }

  GatherFunction gather_;
};

}  // namespace

std::unique_ptr<Bootstrap> make_callback_bootstrap(const RankInfo& info, GatherFunction gather) {
  if (!gather) throw_invalid("make_callback_bootstrap: gather: expected a function, got none");
  return std::make_unique<CallbackBootstrap>(info, std::move(gather));
}

}  // namespace narrowfloat

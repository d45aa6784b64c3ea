// The ranks of an all-reduce: bootstraps of the library, and one over a function of Python.
#include "python/src/rank_groups.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "narrowfloat/bootstrap.h"
#include "narrowfloat/error.h"
#include "python/src/bindings.h"

namespace narrowfloat::python {

std::chrono::milliseconds parse_deadline(double seconds) {
  constexpr double kMost = 1e9;
  if (!(seconds >= 0.0 && seconds <= kMost)) {
    throw Error(ErrorKind::kInvalidArgument,
                "deadline: expected 0 to 1e9 seconds, got " + std::to_string(seconds));
  }
  return std::chrono::milliseconds(static_cast<int64_t>(std::ceil(seconds * 1e3)));
}

std::shared_ptr<nb::callable> share_function(nb::callable function) {
  return {new nb::callable(std::move(function)), [](nb::callable* held) {
            if (!nb::is_alive()) return;
            const nb::gil_scoped_acquire locked;
            delete held;
          }};
}

namespace {

using nb::literals::operator""_a;
using SharedGroup = std::shared_ptr<Bootstrap>;
using Gather = nb::typed<nb::callable, nb::typed<nb::sequence, nb::bytes>(nb::bytes)>;

[[noreturn]] void refuse_gathered(size_t ranks, size_t bytes) {
  throw Error(ErrorKind::kInvalidArgument,
              "all_gather: expected the function to return the bytes of all " +
                  std::to_string(ranks) + " ranks, " + std::to_string(bytes) + " each, in order");
}

void call_gather(const nb::callable& function, std::span<const std::byte> mine,
                 std::span<std::byte> all) {
  const nb::gil_scoped_acquire locked;
  const nb::object gathered = function(nb::bytes(mine.data(), mine.size()));
  auto target = all.begin();
  for (const nb::handle part : nb::iter(gathered)) {
    const auto room = static_cast<size_t>(all.end() - target);
    if (!nb::isinstance<nb::bytes>(part) || room < mine.size() ||
        nb::cast<nb::bytes>(part).size() != mine.size()) {
      refuse_gathered(all.size() / mine.size(), mine.size());
    }
    const auto text = nb::cast<nb::bytes>(part);
    target = std::copy_n(static_cast<const std::byte*>(text.data()), mine.size(), target);
  }
  if (target != all.end()) refuse_gathered(all.size() / mine.size(), mine.size());
}

SharedGroup from_function(Gather all_gather, int rank, int size, int local_rank) {
  const RankInfo info{
      .rank = rank, .size = size, .local_rank = local_rank, .launcher = "arguments", .job_id = {}};
  return make_callback_bootstrap(
      info, [function = share_function(std::move(all_gather))](std::span<const std::byte> mine,
                                                               std::span<std::byte> all) {
        call_gather(*function, mine, all);
      });
}

RankInfo info_of_arguments(int rank, int size, int local_rank, std::string job_id) {
  return {.rank = rank,
          .size = size,
          .local_rank = local_rank < 0 ? rank : local_rank,
          .launcher = "arguments",
          .job_id = std::move(job_id)};
}

std::vector<nb::bytes> gather_bytes(Bootstrap& group, const nb::bytes& mine) {
  const size_t bytes = mine.size();
  std::vector<std::byte> all(bytes * static_cast<size_t>(group.size()));
  {
    const std::span<const std::byte> message(static_cast<const std::byte*>(mine.data()), bytes);
    const nb::gil_scoped_release unlocked;
    group.all_gather(message, all);
  }
  std::vector<nb::bytes> parts;
  for (int rank = 0; rank < group.size(); ++rank) {
    parts.emplace_back(all.data() + bytes * static_cast<size_t>(rank), bytes);
  }
  return parts;
}

}  // namespace

void bind_rank_groups(nb::module_& module) {
  nb::class_<Bootstrap>(module, "RankGroup",
                        "Ranks 0 to size - 1 that exchange small messages on the host. Every call "
                        "of it blocks until all ranks have made it, or raises RuntimeError after "
                        "`deadline` seconds.")
      .def_static("from_function", &from_function, "all_gather"_a, "rank"_a, "size"_a,
                  "local_rank"_a = 0,
                  "all_gather: takes the bytes of this rank and returns those of all ranks, in "
                  "order; it keeps a deadline of its own. local_rank: counts the ranks of a host.")
      .def_static(
          "from_environment",
          [](double deadline) -> SharedGroup {
            const std::chrono::milliseconds limit = parse_deadline(deadline);
            const nb::gil_scoped_release unlocked;
            return make_environment_bootstrap(limit);
          },
          "deadline"_a = 60.0,
          "The processes that torchrun, mpirun, mpiexec or srun started. ValueError where there is "
          "no launcher, with the variables that would help.")
      .def_static(
          "from_files",
          [](const std::string& directory, int rank, int size, int local_rank,
             const std::string& job_id, double deadline) -> SharedGroup {
            const RankInfo info = info_of_arguments(rank, size, local_rank, job_id);
            const std::chrono::milliseconds limit = parse_deadline(deadline);
            const nb::gil_scoped_release unlocked;
            return make_file_bootstrap(directory, info, limit);
          },
          "directory"_a, "rank"_a, "size"_a, "local_rank"_a = -1, "job_id"_a = "",
          "deadline"_a = 60.0,
          "Processes that share a directory. job_id: a text that no other job there has. "
          "local_rank: default: the rank.")
      .def_static(
          "from_tcp",
          [](const std::string& host, int port, int rank, int size, int local_rank,
             const std::string& job_id, double deadline) -> SharedGroup {
            const RankInfo info = info_of_arguments(rank, size, local_rank, job_id);
            const std::chrono::milliseconds limit = parse_deadline(deadline);
            const nb::gil_scoped_release unlocked;
            return make_tcp_bootstrap(host, port, info, limit);
          },
          "host"_a, "port"_a, "rank"_a, "size"_a, "local_rank"_a = -1, "job_id"_a = "",
          "deadline"_a = 60.0, "Rank 0 listens on host and port, the others connect.")
      .def("all_gather", &gather_bytes, "mine"_a,
           "The bytes of all ranks in order; all give as many.")
      .def("barrier", &Bootstrap::barrier, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("rank", &Bootstrap::rank)
      .def_prop_ro("size", &Bootstrap::size)
      .def_prop_ro("local_rank", [](const Bootstrap& self) { return self.info().local_rank; })
      .def_prop_ro("launcher", [](const Bootstrap& self) { return self.info().launcher; })
      .def("__repr__", [](const Bootstrap& self) {
        return "RankGroup(rank=" + std::to_string(self.rank()) +
               ", size=" + std::to_string(self.size()) + ")";
      });
}

}  // namespace narrowfloat::python

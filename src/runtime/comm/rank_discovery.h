// The environment variables of launchers: numbers with their checks, Slurm's node list, the address
// of a rendezvous.
#pragma once

#include <optional>
#include <string>

#include "narrowfloat/bootstrap.h"

namespace narrowfloat {

// Null where the variable is not set.
const char* environment_variable(const char* name);
// A decimal number from `low` to `high`. Throws kInvalidArgument unless the variable is set to one.
int environment_number(const char* name, int low, int high);
// As environment_number(), empty where the variable is not set.
std::optional<int> optional_environment_number(const char* name, int low, int high);

// The place of this process in its step of Slurm. Empty where srun has not started it.
std::optional<RankInfo> discover_slurm_rank();
// An id of MPICH's job on this host, like "hydra 4711.1475324": Hydra's mpirun sets none, but all
// ranks of a host descend from one process of the job, whose number and start these are. Empty
// where no such process is above this one.
std::string hydra_job_id();
// How many of the ranks run on this host, as the launcher of `info` says. Empty where it does not.
std::optional<int> ranks_on_this_host(const RankInfo& info);

// The first host of a list like "node[003-007,9],other": "node003". `variable` is for the error,
// kInvalidArgument.
std::string first_host(const std::string& variable, const std::string& list);

struct HostAndPort {
  std::string host;
  int port = 0;
};
// "host:port", "[::1]:port". `variable` is for the error, kInvalidArgument.
HostAndPort parse_address(const std::string& variable, const std::string& text);

// 20000 to 29999, the same on all ranks of a job.
int port_of_job(const std::string& job_id);

}  // namespace narrowfloat

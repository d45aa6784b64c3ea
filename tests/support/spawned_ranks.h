// Ranks that are processes started from an executable, as tests with CUDA need them: a process that
// has used CUDA cannot be forked.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace narrowfloat::testing {

// Starts `executable` for each rank with the arguments `arguments_of(rank, directory)`, where the
// directory is new and empty. Returns the contents of the files result.RANK that the ranks leave
// there, or how a rank ended without one. Ranks that take longer than `seconds` are killed.
std::vector<std::string> run_spawned_ranks(
    const std::string& executable, int ranks,
    const std::function<std::vector<std::string>(int rank, const std::string& directory)>&
        arguments_of,
    int seconds = 180);

// An executable of the folder that the test lies in.
std::string sibling_executable(const std::string& name);

}  // namespace narrowfloat::testing

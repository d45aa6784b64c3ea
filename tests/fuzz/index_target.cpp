// Indexes from memory. What is accepted is checked against what it promises.
#include <algorithm>
#include <functional>
#include <string>

#include "checkpoint/index.h"
#include "fuzz/fuzz_input.h"
#include "fuzz/fuzz_targets.h"

namespace narrowfloat::testing {
namespace {

void check_index(const ShardIndex& index) {
  fuzz_require(!index.entries.empty() && !index.files.empty(), "an index of nothing");
  fuzz_require(std::is_sorted(index.files.begin(), index.files.end(), std::less_equal<>()),
               "order of files");
  for (const ShardIndex::Entry& entry : index.entries) {
    fuzz_require(entry.file < index.files.size(), "file of a tensor");
  }
  for (const std::string& file : index.files) {
    fuzz_require(!file.empty() && file != "." && file != ".." &&
                     file.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos,
                 "name of a file");
  }
}

}  // namespace

void fuzz_index(std::span<const uint8_t> bytes) {
  expect_result_or_error([&] { check_index(parse_index(FuzzInput(bytes).rest(), "index")); });
}

}  // namespace narrowfloat::testing

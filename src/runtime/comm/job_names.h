// Names that keep jobs apart: hashes and file names made of job ids, and random tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace narrowfloat {

// FNV-1a (RFC draft-eastlake-fnv), 64 bits: the same number on all hosts.
uint64_t hash_text(std::string_view text);

// 16 hexadecimal digits from the system's random numbers.
std::string random_token();

// A part of a file name: up to 48 characters of the job id, with '_' for those that do not fit in
// a name, and its hash, so that different job ids give different names.
std::string job_file_name(std::string_view job_id);

}  // namespace narrowfloat

// The file bootstrap of make_environment_bootstrap(): in a directory that the job makes.
#pragma once

#include <memory>
#include <string>

#include "narrowfloat/bootstrap.h"

namespace narrowfloat {

// As make_file_bootstrap(), in <parent>/narrowfloat-<user>-<job>, which the first rank to come
// makes and the last one to end removes. Refuses a directory of that name which belongs to another
// user.
std::unique_ptr<Bootstrap> make_job_file_bootstrap(const std::string& parent, const RankInfo& info,
                                                   Bootstrap::Milliseconds deadline);

}  // namespace narrowfloat

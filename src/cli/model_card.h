// README.md of a quantized checkpoint: what it is, what it cost, how it was made.
#pragma once

#include <string>
#include <string_view>

#include "cli/report_data.h"

namespace narrowfloat::cli {

// `source_card`: the README.md of the source, whose front matter (license, language, tags) is kept;
// may be empty.
std::string model_card(const ReportData& data, std::string_view source_card);

}  // namespace narrowfloat::cli

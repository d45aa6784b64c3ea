// The report as one HTML page that needs nothing else: styles and plots are in it.
#pragma once

#include <string>

#include "cli/report_data.h"

namespace narrowfloat::cli {

std::string html_report(const ReportData& data);

}  // namespace narrowfloat::cli

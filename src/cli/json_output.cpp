// nlohmann::ordered_json keeps the order in which fields are set.
#include "cli/json_output.h"

#include <cmath>

#include "cli/output.h"

namespace narrowfloat::cli {
namespace {

constexpr int kSchemaVersion = 1;
constexpr bool kAsciiOnly = true;
// Paths need not be UTF-8.
constexpr auto kOnBadUtf8 = Json::error_handler_t::replace;

}  // namespace

Json json_document(std::string_view command) {
  return Json{{"schema_version", kSchemaVersion}, {"command", command}};
}

Json json_number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

Json figures_json(const ErrorFigures& figures) {
  return Json{{"elements", figures.elements},
              {"mse", json_number(figures.mse)},
              {"relative_error", json_number(figures.relative_error)},
              {"sqnr_db", json_number(figures.sqnr_db)},
              {"cosine", json_number(figures.cosine)},
              {"norm_ratio", json_number(figures.norm_ratio)},
              {"max_abs", json_number(figures.max_abs)},
              {"max_abs_index", figures.max_abs_index},
              {"clipped_percent",
               figures.clipped_percent ? json_number(*figures.clipped_percent) : Json(nullptr)},
              {"flushed_percent", json_number(figures.flushed_percent)},
              {"nonfinite", figures.nonfinite}};
}

void print_json(const Json& document) {
  write_stdout(document.dump(2, ' ', kAsciiOnly, kOnBadUtf8) + "\n");
}

void print_json_event(const Json& event) {
  write_stderr(event.dump(-1, ' ', kAsciiOnly, kOnBadUtf8) + "\n");
}

}  // namespace narrowfloat::cli

// JSON documents. Every command prints at most one, an object that begins with "schema_version" and
// "command". Fields are added in later versions, never changed or removed.
#pragma once

#include <string_view>

#include <nlohmann/json.hpp>

#include "narrowfloat/checkpoint.h"

namespace narrowfloat::cli {

using Json = nlohmann::ordered_json;

Json json_document(std::string_view command);

// A number; infinities and NaN, which JSON does not have, as the strings "inf", "-inf" and "nan".
Json json_number(double value);
Json figures_json(const ErrorFigures& figures);

// ASCII only, so that no name from a file reaches a terminal as a control sequence.
void print_json(const Json& document);
// The same on one line, to stderr: for events.
void print_json_event(const Json& event);

}  // namespace narrowfloat::cli

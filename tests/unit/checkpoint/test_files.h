// Handcrafted files for the checkpoint tests, and a check of an error's kind and message.
#pragma once

#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "narrowfloat/error.h"
#include "support/temp_dir.h"

namespace narrowfloat {

inline void write_file(const std::string& path, std::string_view bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  ASSERT_TRUE(file.good()) << path;
}

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::string length_field(uint64_t length) {
  std::string field;
  for (int i = 0; i < 8; ++i) field += static_cast<char>(length >> (8 * i) & 0xFFU);
  return field;
}

// A safetensors file: length field, header, `data_bytes` bytes counting up from 0.
inline std::string safetensors_bytes(std::string_view json, size_t data_bytes = 0) {
  std::string bytes = length_field(json.size());
  bytes += json;
  for (size_t i = 0; i < data_bytes; ++i) bytes += static_cast<char>(i & 0xFFU);
  return bytes;
}

// A header entry.
inline std::string entry(std::string_view name, std::string_view dtype, std::string_view shape,
                         std::string_view offsets) {
  std::string text = "\"";
  text.append(name).append("\":{\"dtype\":\"").append(dtype);
  text.append("\",\"shape\":[").append(shape);
  text.append("],\"data_offsets\":[").append(offsets).append("]}");
  return text;
}

// [begin, end) as the text of a shape or of offsets: "0,4".
inline std::string pair_text(size_t begin, size_t end) {
  return std::to_string(begin).append(",").append(std::to_string(end));
}

// {a,b,c}
inline std::string object(const std::vector<std::string>& members) {
  std::string text = "{";
  for (const std::string& member : members) text.append(member).append(",");
  if (text.back() == ',') text.pop_back();
  return text.append("}");
}

// Fails unless `action` throws an Error of this kind whose message holds `part`.
template <typename Action>
void expect_error(ErrorKind kind, std::string_view part, Action action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.kind()), to_string(kind)) << error.what();
    EXPECT_NE(std::string_view(error.what()).find(part), std::string_view::npos)
        << "message: " << error.what() << "\nexpected part: " << part;
    return;
  }
  ADD_FAILURE() << "no error; expected one with: " << part;
}

}  // namespace narrowfloat

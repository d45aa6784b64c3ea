// Every rule of the safetensors header, each with a handcrafted file and the error it must give.
// Files are opened with the public reader, so nothing before the header parser can hide a case.
#include "checkpoint/safetensors_header.h"

#include <vector>

#include <fmt/ranges.h>

#include "test_files.h"

namespace narrowfloat {
namespace {

struct HostileFile {
  std::string_view name;
  std::string bytes;
  std::string_view part;  // A part of the message.
};

void expect_all_refused(const std::vector<HostileFile>& files) {
  const TempDir dir;
  const std::string path = dir / "t.safetensors";
  for (const HostileFile& file : files) {
    SCOPED_TRACE(file.name);
    write_file(path, file.bytes);
    expect_error(ErrorKind::kCorruptData, file.part, [&] { const SafetensorsReader reader(path); });
    // Every message says which file.
    expect_error(ErrorKind::kCorruptData,
                 "t.safetensors: ", [&] { const SafetensorsReader reader(path); });
  }
}

// A file with the one entry `json_members` "..." and `data_bytes` bytes of data.
std::string one(std::string_view members, size_t data_bytes = 8) {
  return safetensors_bytes(std::string("{\"t\":{").append(members).append("}}"), data_bytes);
}
std::string one(std::string_view dtype, std::string_view shape, std::string_view offsets,
                size_t data_bytes = 8) {
  return safetensors_bytes(object({entry("t", dtype, shape, offsets)}), data_bytes);
}

TEST(HeaderLength, RefusesWhatIsOverTheFileOrTheLimit) {
  std::vector<HostileFile> files;
  const std::string empty = safetensors_bytes("{}");
  for (size_t size = 0; size < 8; ++size) {
    files.push_back({"short file", empty.substr(0, size), "less than the length field"});
  }
  const std::string body = "{}      ";
  for (const uint64_t length : {uint64_t{9}, uint64_t{16}, uint64_t{100'000'000}}) {
    files.push_back({"over the file", length_field(length) + body, "does not fit in the file"});
  }
  for (const uint64_t length :
       {uint64_t{100'000'001}, uint64_t{1} << 32, uint64_t{1} << 63, ~uint64_t{0}, ~uint64_t{0} - 4,
        ~uint64_t{0} - 7, ~uint64_t{0} - 8}) {
    files.push_back({"over the limit", length_field(length) + body, "over the limit of 100000000"});
  }
  files.push_back({"length 0", length_field(0) + body, "must start with '{'"});
  files.push_back({"length 1", length_field(1) + body, "must end with '}'"});
  expect_all_refused(files);
}

TEST(HeaderLength, NamesCommonFilesThatAreSomethingElse) {
  expect_all_refused({
      {"LFS", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"},
      {"GGUF", "GGUF\x03" + std::string(20, '\0'), "a GGUF file"},
      {"zip", "PK\x03\x04" + std::string(20, '\x01'), "zip archive"},
      {"HTML", "<!DOCTYPE html><html>", "the download went wrong"},
  });
}

TEST(HeaderText, RefusesWhatSurroundsTheObject) {
  const std::string nul(1, '\0');
  expect_all_refused({
      {"leading space", safetensors_bytes(" {}"), "must start with '{'"},
      {"leading newline", safetensors_bytes("\n{}"), "must start with '{'"},
      {"byte order mark", safetensors_bytes("\xEF\xBB\xBF{}"), "must start with '{'"},
      {"array", safetensors_bytes("[]"), "must start with '{'"},
      {"trailing newline", safetensors_bytes("{}\n"), "must end with '}'"},
      {"trailing tab", safetensors_bytes("{} \t "), "must end with '}'"},
      {"trailing NUL", safetensors_bytes("{}" + nul), "got '\\x00'"},
      {"trailing text", safetensors_bytes("{}x"), "must end with '}'"},
      {"second object", safetensors_bytes("{}{}"), "invalid JSON"},
      {"NUL then object", safetensors_bytes("{}" + nul + "{}"), "NUL byte"},
      {"unclosed", safetensors_bytes("{{}"), "invalid JSON"},
      {"comment", safetensors_bytes("{/**/}"), "invalid JSON"},
      {"trailing comma", safetensors_bytes(object({entry("t", "U8", "0", "0,0"), ""})),
       "invalid JSON"},
      {"invalid UTF-8", safetensors_bytes(object({entry("t\xFF", "U8", "0", "0,0")})),
       "invalid JSON"},
      {"overlong UTF-8", safetensors_bytes(object({entry("t\xC0\x80", "U8", "0", "0,0")})),
       "invalid JSON"},
      {"lone surrogate", safetensors_bytes(object({entry("\\uDC00", "U8", "0", "0,0")})),
       "invalid JSON"},
  });
}

TEST(HeaderNames, RefusesNulAndExcessiveLength) {
  const std::string long_name(kMaxNameBytes + 1, 'n');
  expect_all_refused({
      {"escaped NUL", safetensors_bytes(object({entry("a\\u0000b", "U8", "0", "0,0")})),
       "NUL character in the name 'a\\x00b'"},
      {"NUL in metadata key", safetensors_bytes(R"({"__metadata__":{"\u0000":""}})"),
       "NUL character"},
      {"64 KiB and one", safetensors_bytes(object({entry(long_name, "U8", "0", "0,0")})),
       "has 65537 bytes; the limit is 65536"},
      {"1 MB", safetensors_bytes(object({entry(std::string(1'000'000, 'n'), "U8", "0", "0,0")})),
       "the limit is 65536"},
      {"20 MB", safetensors_bytes(object({entry(std::string(20'000'000, 'n'), "U8", "0", "0,0")})),
       "a JSON string or number of 20000000 bytes"},
  });
}

TEST(HeaderNames, AreEscapedInMessagesAndOtherwiseFree) {
  expect_all_refused({
      {"terminal escape", safetensors_bytes(object({entry("\\u001b[2J", "U8", "1", "0,0")})),
       "tensor '\\x1b[2J'"},
      {"newline", safetensors_bytes(object({entry("a\\nb", "U8", "1", "0,0")})), "tensor 'a\\nb'"},
  });
  const TempDir dir;
  for (const char* name :
       {"../../etc/passwd", "/abs", "", "a\\nb", "\\u001b[2J", "\\ud83d\\ude00"}) {
    write_file(dir / "t.safetensors",
               safetensors_bytes(object({entry(name, "U8", "1", "0,1")}), 1));
    EXPECT_NO_THROW(SafetensorsReader(dir / "t.safetensors")) << name;
  }
}

TEST(HeaderKeys, RefusesDuplicatesAtEveryLevel) {
  const std::string a = entry("a", "U8", "0", "0,0");
  const std::string escaped_a = entry("\\u0061", "U8", "0", "0,0");
  const std::string metadata = R"("__metadata__":{})";
  expect_all_refused({
      {"tensor", safetensors_bytes(object({a, a})), "duplicate key 'a'"},
      {"tensor by escape", safetensors_bytes(object({a, escaped_a})), "duplicate key 'a'"},
      {"metadata", safetensors_bytes(object({metadata, metadata})), "duplicate key '__metadata__'"},
      {"metadata key", safetensors_bytes(R"({"__metadata__":{"k":"1","k":"2"}})"),
       "duplicate key 'k'"},
      {"dtype", one(R"("dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8])"),
       "duplicate key 'dtype'"},
      {"shape", one(R"("dtype":"U8","shape":[1],"shape":[8],"data_offsets":[0,8])"),
       "duplicate key 'shape'"},
      {"data_offsets", one(R"("dtype":"U8","shape":[8],"data_offsets":[0,8],"data_offsets":[0,8])"),
       "duplicate key 'data_offsets'"},
  });
}

TEST(HeaderMetadata, MapsStringsToStringsWithinBounds) {
  const std::string big(size_t{9} << 20, 'v');
  std::vector<std::string> many;
  for (int i = 0; i < 100'001; ++i) many.push_back(fmt::format("\"{}\":\"\"", i));
  const auto with_metadata = [](const std::vector<std::string>& members) {
    return safetensors_bytes(object({std::string("\"__metadata__\":").append(object(members))}));
  };
  expect_all_refused({
      {"number", safetensors_bytes(R"({"__metadata__":{"k":1}})"), "metadata 'k' must be a string"},
      {"null", safetensors_bytes(R"({"__metadata__":{"k":null}})"), "got null"},
      {"object", safetensors_bytes(R"({"__metadata__":{"k":{}}})"), "got an object"},
      {"array", safetensors_bytes(R"({"__metadata__":{"k":[]}})"), "got an array"},
      {"not an object", safetensors_bytes(R"({"__metadata__":"x"})"), "must be an object"},
      {"18 MB", with_metadata({fmt::format("\"a\":\"{}\"", big), fmt::format("\"b\":\"{}\"", big)}),
       "bytes of metadata"},
      {"100,001 entries", with_metadata(many), "more than 100000 metadata entries"},
  });
}

TEST(HeaderEntry, NeedsExactlyItsThreeFieldsOfTheRightTypes) {
  expect_all_refused({
      {"entry is a number", safetensors_bytes(R"({"t":3})"), "'t' must be an object, got 3"},
      {"entry is an array", safetensors_bytes(R"({"t":[]})"), "an array"},
      {"entry is a string", safetensors_bytes(R"({"t":"x"})"), "got the string 'x'"},
      {"empty entry", one(""), "'dtype' is missing"},
      {"no dtype", one(R"("shape":[8],"data_offsets":[0,8])"), "'dtype' is missing"},
      {"no shape", one(R"("dtype":"U8","data_offsets":[0,8])"), "'shape' is missing"},
      {"no offsets", one(R"("dtype":"U8","shape":[8])"), "'data_offsets' must hold two numbers"},
      {"unknown field", one(R"("dtype":"U8","shape":[8],"data_offsets":[0,8],"strides":[1])"),
       "unknown field 'strides'"},
      {"field in other case", one(R"("Dtype":"U8","shape":[8],"data_offsets":[0,8])"),
       "unknown field 'Dtype'"},
      {"dtype is a number", one(R"("dtype":8,"shape":[8],"data_offsets":[0,8])"),
       "'dtype' must be a string, got 8"},
      {"dtype is an array", one(R"("dtype":["U8"],"shape":[8],"data_offsets":[0,8])"),
       "'dtype' must be a string, got an array"},
      {"dtype is an object", one(R"("dtype":{},"shape":[8],"data_offsets":[0,8])"), "an object"},
      {"shape is a number", one(R"("dtype":"U8","shape":8,"data_offsets":[0,8])"),
       "'shape' must be an array, got 8"},
      {"shape is null", one(R"("dtype":"U8","shape":null,"data_offsets":[0,8])"), "got null"},
      {"shape is nested", one(R"("dtype":"U8","shape":[[8]],"data_offsets":[0,8])"),
       "nested deeper than 3"},
      {"one offset", one(R"("dtype":"U8","shape":[8],"data_offsets":[0])"), "two numbers"},
      {"three offsets", one(R"("dtype":"U8","shape":[8],"data_offsets":[0,8,8])"), "not more"},
      {"no offset", one(R"("dtype":"U8","shape":[8],"data_offsets":[])"), "two numbers"},
      {"offsets are an object", one(R"("dtype":"U8","shape":[8],"data_offsets":{})"), "an object"},
      {"offsets are a string", one(R"("dtype":"U8","shape":[8],"data_offsets":"0,8")"),
       "'data_offsets' must be an array"},
      {"unknown dtype", one("U9", "8", "0,8"), "unknown dtype 'U9'"},
      {"dtype in lower case", one("u8", "8", "0,8"), "unknown dtype 'u8'"},
      {"empty dtype", one("", "8", "0,8"), "unknown dtype ''"},
      {"hostile dtype", one("\\u001b", "8", "0,8"), "unknown dtype '\\x1b'"},
  });
}

TEST(HeaderNumbers, MustBePlainDecimalIntegersBelow2To63) {
  std::vector<HostileFile> files;
  for (const char* number :
       {"1e3", "8.0", "-0", "-1", "8e0", "\"8\"", "true", "null", "9223372036854775808",
        "18446744073709551616", "100000000000000000000000000", "-9223372036854775808", "0.5"}) {
    files.push_back({number, one("U8", number, "0,8"), "'shape' must hold plain decimal integers"});
    files.push_back({number, one("U8", "8", std::string("0,") + number),
                     "'data_offsets' must hold plain decimal integers"});
  }
  for (const char* number : {"08", "+8", "0x8", "NaN", "8.", ".5", "1e400", "8 8", "--8"}) {
    files.push_back({number, one("U8", number, "0,8"), "invalid JSON"});
    files.push_back({number, one("U8", "8", std::string("0,") + number), "invalid JSON"});
  }
  expect_all_refused(files);
}

TEST(HeaderShapes, AreCheckedAgainstTheSpanBeforeAnyUse) {
  std::string rank33 = "1";
  for (int i = 1; i < 33; ++i) rank33 += ",1";
  std::string million = "1";
  for (int i = 1; i < 1'000'000; ++i) million += ",1";
  expect_all_refused({
      {"too few bytes", one("U8", "9", "0,8"), "needs 9 bytes, but data_offsets [0, 8) hold 8"},
      {"too many bytes", one("U8", "7", "0,8"), "needs 7 bytes"},
      {"wrong width", one("F32", "8", "0,8"), "shape [8] of F32 needs 32 bytes"},
      {"scalar", one("F32", "", "0,8"), "needs 4 bytes"},
      {"claimed empty", one("U8", "0", "0,8"), "needs 0 bytes"},
      {"product wraps to 0", one("U8", "4294967296,4294967296", "0,0", 0), "overflows"},
      {"product wraps to 8", one("U8", "2305843009213693953,8", "0,8"), "overflows"},
      {"bytes wrap", one("F64", "2305843009213693952", "0,0", 0), "overflows"},
      {"largest extent", one("U8", "9223372036854775807", "0,8"), "overflows"},
      {"bits overflow", one("U8", "2305843009213693952", "0,8"), "overflows"},
      {"beside a zero", one("F64", "0,4611686018427387904", "0,0", 0), "overflows"},
      {"around a zero", one("U8", "9223372036854775807,0,9223372036854775807", "0,0", 0),
       "overflows"},
      {"F4 with an odd count", one("F4", "15", "0,8"), "does not fill whole bytes"},
      {"F4 with one element", one("F4", "1", "0,1", 1), "does not fill whole bytes"},
      {"F4 taken for bytes", one("F4", "8", "0,8"), "needs 4 bytes"},
      {"F6_E2M3 with a part byte", one("F6_E2M3", "6", "0,5", 5), "does not fill whole bytes"},
      {"F6_E3M2 with a part byte", one("F6_E3M2", "2", "0,2", 2), "does not fill whole bytes"},
      {"rank 33", one("U8", rank33, "0,1", 1), "more than 32 dimensions"},
      {"10^6 dimensions", one("U8", million, "0,1", 1), "more than 32 dimensions"},
  });
}

TEST(HeaderShapes, AcceptsScalarsEmptyTensorsAndRank32) {
  std::string rank32 = "8";
  for (int i = 1; i < 32; ++i) rank32 += ",1";
  const TempDir dir;
  const auto open = [&](const std::string& bytes) {
    write_file(dir / "t.safetensors", bytes);
    return SafetensorsReader(dir / "t.safetensors").tensors()[0];
  };
  EXPECT_EQ(open(one("F64", "", "0,8")).num_elements(), 1);
  EXPECT_EQ(open(one("U8", rank32, "0,8")).shape.size(), 32U);
  const TensorInfo wide = open(one("F64", "144115188075855871,0", "0,0", 0));  // 2^57 - 1
  EXPECT_EQ(wide.num_elements(), 0);
  EXPECT_EQ(wide.size_bytes, 0U);
  EXPECT_EQ(open(one("F4", "3,0", "0,0", 0)).num_elements(), 0);
  EXPECT_EQ(open(one("F6_E2M3", "4", "0,3", 3)).size_bytes, 3U);
}

TEST(HeaderOffsets, MustTileTheBuffer) {
  const auto two = [](std::string_view a, std::string_view b, size_t data_bytes) {
    return safetensors_bytes(object({entry("a", "U8", "4", a), entry("b", "U8", "4", b)}),
                             data_bytes);
  };
  const std::string middle =
      safetensors_bytes(object({entry("a", "U8", "4", "0,4"), entry("z", "U8", "0", "2,2")}), 4);
  expect_all_refused({
      {"end before begin", one("U8", "8", "8,0"), "end before they begin"},
      {"beyond the file", one("U8", "9", "0,9"), "end after the file's 8 data bytes"},
      {"far beyond", one("U8", "8", "9223372036854775799,9223372036854775807"), "end after"},
      {"overlap by 1", two("0,4", "3,7", 7), "tensors 'a' and 'b' overlap by 1 bytes"},
      {"same bytes twice", two("0,4", "0,4", 4), "overlap by 4 bytes"},
      {"empty tensor inside another", middle, "overlap by 2 bytes"},
      {"gap of 1", two("0,4", "5,9", 9), "1 bytes before tensor 'b' belong to no tensor"},
      {"not from 0", two("1,5", "5,9", 9), "1 bytes before tensor 'a' belong to no tensor"},
      {"not to the end", two("0,4", "4,8", 9), "1 bytes after the last tensor"},
      {"data without tensors", safetensors_bytes("{}", 1), "1 bytes after the last tensor"},
  });
}

TEST(HeaderOffsets, AcceptsAnyOrderOfNamesAndEmptyTensorsThatShareAPoint) {
  const TempDir dir;
  write_file(
      dir / "t.safetensors",
      safetensors_bytes(object({entry("z", "U8", "1", "0,1"), entry("e2", "F32", "0", "1,1"),
                                entry("a", "F32", "1", "1,5"), entry("e1", "U8", "0", "1,1")}),
                        5));
  const SafetensorsReader reader(dir / "t.safetensors");
  std::vector<std::string> names;
  for (const TensorInfo& tensor : reader.tensors()) names.push_back(tensor.name);
  EXPECT_EQ(names, (std::vector<std::string>{"z", "e1", "e2", "a"}));
}

TEST(HeaderOffsets, LenientModeWarnsOfHolesAndTrailingBytesOnly) {
  const TempDir dir;
  const std::string path = dir / "t.safetensors";
  write_file(path, safetensors_bytes(
                       object({entry("a", "U8", "4", "1,5"), entry("b", "U8", "4", "7,11")}), 20));
  const SafetensorsReader reader(path, {.lenient = true});
  ASSERT_EQ(reader.warnings().size(), 1U);
  EXPECT_NE(reader.warnings()[0].find("12 bytes in 3 place(s)"), std::string::npos);
  write_file(path, safetensors_bytes(
                       object({entry("a", "U8", "4", "0,4"), entry("b", "U8", "4", "3,7")}), 7));
  expect_error(ErrorKind::kCorruptData, "overlap",
               [&] { const SafetensorsReader overlapping(path, {.lenient = true}); });
  write_file(path, one("U8", "9", "0,9"));
  expect_error(ErrorKind::kCorruptData, "end after",
               [&] { const SafetensorsReader beyond(path, {.lenient = true}); });
}

TEST(HeaderDepth, IsThreeLevels) {
  const std::string deep(1'000'000, '[');
  expect_all_refused({
      {"four levels", one(R"("dtype":"U8","shape":[[]],"data_offsets":[0,8])"), "deeper than 3"},
      {"10^6 levels", one("\"dtype\":\"U8\",\"shape\":" + deep + std::string(1'000'000, ']')),
       "deeper than 3"},
      {"nested objects", safetensors_bytes(R"({"t":{"dtype":{"x":{"y":1}}}})"), "an object"},
  });
}

TEST(HeaderLimits, StopAtTheConfiguredNumberOfTensors) {
  const HeaderContext context{.file = "f", .limits = {.max_tensors = 2}};
  std::vector<std::string> entries = {entry("a", "U8", "0", "0,0"), entry("b", "U8", "0", "0,0")};
  EXPECT_EQ(parse_header(object(entries), context).tensors.size(), 2U);
  entries.push_back(entry("c", "U8", "0", "0,0"));
  expect_error(ErrorKind::kCorruptData, "more than 2 tensors",
               [&] { parse_header(object(entries), context); });
}

// Twenty small files as software writes them: all dtypes, the tensors of every convention,
// metadata, padding, odd places, names of any characters.
std::vector<std::string> small_files() {
  const auto file = [](const std::vector<std::string>& members, size_t data_bytes,
                       std::string_view padding = "") {
    return safetensors_bytes(object(members).append(padding), data_bytes);
  };
  std::vector<std::string> dtypes;
  std::vector<std::string> dimensions;
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const size_t at = dtypes.size() * 8;  // Eight bytes each.
    dtypes.push_back(entry(fmt::format("t{}", i), name(dtype), std::to_string(64 / bits(dtype)),
                           pair_text(at, at + 8)));
  }
  dtypes[1] = entry("t1", "F4", "4,4", "8,16");
  dtypes[2] = entry("t2", "U8", "8", "16,24");  // 6-bit types do not fill eight bytes.
  dtypes[3] = entry("t3", "U8", "2,2,2", "24,32");
  for (size_t i = 0; i < kMaxTensorRank; ++i) dimensions.emplace_back("1");
  const std::string metadata =
      R"("__metadata__":{"format":"pt","narrowfloat.convention":"nvfp4-ct"})";
  const std::string w = "model.layers.0.mlp.up_proj.weight";
  return {
      file({}, 0),
      file({R"("__metadata__":{})"}, 0, "      "),
      file({metadata}, 0),
      file(dtypes, 176),
      file({entry("f6", "F6_E2M3", "4", "0,3"), entry("g6", "F6_E3M2", "8", "3,9")}, 9),
      file({entry(w, "BF16", "2,16", "0,64")}, 64),
      file({entry(w + "_packed", "U8", "2,8", "0,16"),
            entry(w + "_scale", "F8_E4M3", "2,1", "16,18"),
            entry(w + "_global_scale", "F32", "1", "18,22"), metadata},
           22),
      file({entry(w, "U8", "2,8", "0,16"), entry(w + "_scale", "F8_E4M3", "2,1", "16,18"),
            entry(w + "_scale_2", "F32", "", "18,22"), entry("input_scale", "F32", "", "22,26")},
           26),
      file({entry(w + "_packed", "U8", "1,16", "0,16"), entry(w + "_scale", "U8", "1,1", "16,17")},
           17),
      file({entry(w, "F8_E4M3", "1,32", "0,32"), entry(w + "_scale", "U8", "1,1", "32,33")}, 33),
      file({entry(w, "F8_E4M3", "4,8", "0,32"), entry(w + "_scale_inv", "F32", "1,1", "32,36")},
           36),
      file({entry("experts_blocks", "U8", "1,2,1,16", "0,32"),
            entry("experts_scales", "U8", "1,2,1", "32,34"), entry("bias", "BF16", "1,2", "34,38")},
           38),
      file({entry("w1.weight", "I8", "2,16", "0,32"), entry("w1.scale", "F8_E8M0", "2,1", "32,34")},
           34),
      file({entry("empty", "F32", "0", "0,0"), entry("also", "F32", "7,0,9", "0,0")}, 0),
      file({entry("scalar", "F64", "", "1,9"), entry("odd", "BOOL", "1", "0,1")}, 9, "   "),
      file({entry("ranks", "U8", fmt::format("{}", fmt::join(dimensions, ",")), "0,1")}, 1),
      file({entry(R"(\u00e9\n\")", "U8", "1", "0,1"), entry("\xC3\xA8", "U8", "1", "1,2")}, 2),
      file({entry("../../etc/passwd", "I64", "1", "0,8"), entry("", "C64", "1", "8,16")}, 16),
      file({R"( "spaces" : {"shape" : [ 2 ] , "data_offsets":[0, 4],"dtype" :"I16"} )"}, 4),
      file({entry("b", "U8", "3", "2,5"), entry("a", "U8", "2", "0,2"),
            entry("c", "U8", "4", "5,9")},
           9),
  };
}

// The header of a whole file in memory, with the reader's checks.
ParsedHeader parse_file(std::string_view file) {
  const uint64_t length = header_length(file, file.size(), "t.safetensors");
  const uint64_t begin = kLengthFieldBytes + length;
  return parse_header(
      file.substr(kLengthFieldBytes, length),
      {.file = "t.safetensors", .buffer_begin = begin, .buffer_bytes = file.size() - begin});
}

TEST(DamagedFiles, NoneIsAcceptedThatWasCutAtAnyByte) {
  size_t num_cuts = 0;
  for (const std::string& whole : small_files()) {
    EXPECT_NO_THROW(parse_file(whole)) << whole;
    for (size_t size = 0; size < whole.size(); ++size, ++num_cuts) {
      SCOPED_TRACE(fmt::format("{} of {}", size, printable(whole)));
      expect_error(ErrorKind::kCorruptData,
                   "t.safetensors: ", [&] { parse_file(std::string_view(whole).substr(0, size)); });
    }
  }
  EXPECT_EQ(small_files().size(), 20U);
  EXPECT_GT(num_cuts, 3000U);
}

// A flipped bit is noticed, or the file means something else: another name, another type of the
// same width. What is accepted keeps what a header promises.
TEST(DamagedFiles, NoBitFlipInAHeaderIsAcceptedWithoutItsPromises) {
  size_t num_flips = 0;
  size_t num_accepted = 0;
  for (const std::string& whole : small_files()) {
    const size_t header_bytes = kLengthFieldBytes + header_length(whole, whole.size(), "t");
    for (size_t bit = 0; bit < 8 * header_bytes; ++bit, ++num_flips) {
      std::string flipped = whole;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
      SCOPED_TRACE(fmt::format("bit {} of {}", bit, printable(whole)));
      try {
        const ParsedHeader header = parse_file(flipped);
        uint64_t covered = kLengthFieldBytes + header_length(flipped, flipped.size(), "t");
        for (const TensorInfo& tensor : header.tensors) {
          ASSERT_EQ(tensor.offset, covered);
          ASSERT_EQ(tensor.size_bytes, dense_size(tensor.dtype, tensor.shape).size_bytes);
          covered += tensor.size_bytes;
        }
        ASSERT_EQ(covered, flipped.size());
        ++num_accepted;
      } catch (const Error& error) {
        ASSERT_EQ(to_string(error.kind()), "corrupt data") << error.what();
      }
    }
  }
  EXPECT_GT(num_flips, 20'000U);
  EXPECT_LT(num_accepted, num_flips / 2);
}

TEST(TensorInfoElements, RefusesAShapeThatOverflows) {
  const TensorInfo info{"t", DType::kU8, {int64_t{1} << 32, int64_t{1} << 32}, 0, 0};
  expect_error(ErrorKind::kInvalidArgument, "overflows", [&] { (void)info.num_elements(); });
}

}  // namespace
}  // namespace narrowfloat

// The list of formats: order, completeness, and what the traits promise to generic code.
#include "formats/registry.h"

#include <set>

#include <gtest/gtest.h>

#include "narrowfloat/error.h"

namespace narrowfloat {
namespace {

TEST(FormatRegistry, ListsTheFormatsInTheOrderOfTheirIds) {
  int next = 0;
  AllFormats::for_each(
      [&]<BlockFormat Format>() { EXPECT_EQ(static_cast<int>(Format::kId), next++); });
  EXPECT_EQ(next, AllFormats::kSize);
  EXPECT_EQ(next, 7);
}

TEST(FormatRegistry, GivesEveryFormatAnOwnNameAndADescription) {
  std::set<std::string_view> names;
  AllFormats::for_each([&]<BlockFormat Format>() {
    names.insert(Format::kName);
    EXPECT_FALSE(Format::kDescription.empty());
  });
  EXPECT_EQ(names, (std::set<std::string_view>{"nvfp4", "nvfp4_per_token", "mxfp4", "mxfp8",
                                               "fp8_1x128", "fp8_128x128", "fp8_tensor"}));
}

TEST(FormatRegistry, VisitsExactlyTheFormatWithTheId) {
  for (int id = 0; id < AllFormats::kSize; ++id) {
    int visits = 0;
    visit_format(static_cast<FormatId>(id), [&]<BlockFormat Format>() {
      ++visits;
      EXPECT_EQ(static_cast<int>(Format::kId), id);
    });
    EXPECT_EQ(visits, 1);
  }
}

TEST(FormatRegistry, RefusesAnIdThatIsNoFormat) {
  const auto visitor = []<BlockFormat Format>() {};
  for (const int id : {-1, AllFormats::kSize, 99}) {
    EXPECT_THROW(visit_format(static_cast<FormatId>(id), visitor), Error) << id;
  }
}

TEST(FormatRegistry, StoresAByteExactlyWhereScalesAreBytes) {
  AllFormats::for_each([]<BlockFormat Format>() {
    EXPECT_EQ(sizeof(typename Format::Stored), kHasByteScales<Format> ? 1U : 4U) << Format::kName;
    EXPECT_EQ(Format::kScaleType == ScaleType::kF32, !kHasByteScales<Format>) << Format::kName;
  });
}

}  // namespace
}  // namespace narrowfloat

// Settings are read from the words that record them.
#include "layers/encode_settings.h"

#include <gtest/gtest.h>

namespace narrowfloat {
namespace {

TEST(EncodeSettings, EveryRecordIsReadAgain) {
  for (const MathMode math : {MathMode::kExact, MathMode::kFast}) {
    for (const Ue8m0Rounding rule :
         {Ue8m0Rounding::kUp, Ue8m0Rounding::kFloor, Ue8m0Rounding::kEven}) {
      for (const ScaleSearch search :
           {ScaleSearch::kAmax, ScaleSearch::kFourOverSix, ScaleSearch::kFull}) {
        const std::string text = settings_text({math, rule, search});
        const RecordedSettings found = parse_settings(text);
        ASSERT_TRUE(found.encode) << text;
        EXPECT_EQ(found.encode->math, math);
        EXPECT_EQ(found.encode->mx_scale, rule);
        EXPECT_EQ(found.encode->scale_search, search);
        EXPECT_FALSE(found.has_gptq || found.has_statistics());
      }
    }
  }
}

TEST(EncodeSettings, StatisticsAreKeptWordByWord) {
  const std::string moments = activation_moments_text("12");
  EXPECT_FALSE(parse_settings(settings_text({}) + moments).has_gptq);
  const RecordedSettings found = parse_settings("lossy=true" + gptq_text("a=b") + moments);
  EXPECT_TRUE(found.has_gptq);
  EXPECT_EQ(found.statistics, " gptq=a=b activation_moments=12");
}

TEST(EncodeSettings, OtherWordsLeaveThemOpen) {
  for (const char* text : {"", " ", "math", "math=", "math=best", "=", "lossy=false math=exact",
                           "math=exact *.q_proj.*=mxfp8", "scale_search=four"}) {
    EXPECT_FALSE(parse_settings(text).encode) << text;
  }
}

}  // namespace
}  // namespace narrowfloat

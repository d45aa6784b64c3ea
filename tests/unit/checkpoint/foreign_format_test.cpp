// Recognition of weight files that are not safetensors.
#include "checkpoint/foreign_format.h"

#include "test_files.h"

namespace narrowfloat {
namespace {

TEST(ForeignFormat, IsRecognisedByTheEndingInAnyCase) {
  for (const char* name : {"a.bin", "dir/a.pt", "a.pth", "A.CKPT", "a.gguf", ".bin"}) {
    EXPECT_TRUE(has_foreign_name(name)) << name;
    expect_error(ErrorKind::kInvalidArgument, "is not read: ", [&] { refuse_foreign_name(name); });
  }
  for (const char* name : {"a.safetensors", "a.bin.safetensors", "bin", "a.bins", ""}) {
    EXPECT_FALSE(has_foreign_name(name)) << name;
    EXPECT_NO_THROW(refuse_foreign_name(name)) << name;
  }
}

TEST(ForeignFormat, SaysWhatToDoInstead) {
  expect_error(ErrorKind::kInvalidArgument, "convert it to safetensors first",
               [] { refuse_foreign_name("pytorch_model.bin"); });
  expect_error(ErrorKind::kInvalidArgument, "start from the safetensors checkpoint",
               [] { refuse_foreign_name("model.gguf"); });
}

TEST(ForeignFormat, IsRecognisedByTheFirstBytes) {
  EXPECT_NE(describe_foreign_content("version https").find("git lfs pull"), std::string::npos);
  EXPECT_NE(describe_foreign_content("GGUF\x03").find("GGUF"), std::string::npos);
  EXPECT_EQ(describe_foreign_content(std::string_view("\x10\0\0\0\0\0\0\0", 8)), "");
}

}  // namespace
}  // namespace narrowfloat

// Selection among implementations: order, reasons, and the pin NARROWFLOAT_FORCE.
#include "runtime/dispatch.h"

#include <array>
#include <span>

#include <gtest/gtest.h>

#include "forced.h"
#include "narrowfloat/error.h"

namespace narrowfloat {
namespace {

struct Problem {
  int size = 0;
};
std::string to_string(const Problem& problem) { return std::to_string(problem.size) + " things"; }

struct Impl {
  std::string_view name;
  Support (*supports)(const Problem& problem);
};

Support even_only(const Problem& problem) {
  return problem.size % 2 == 0 ? Support::yes() : Support::no("size must be even");
}
Support small_only(const Problem& problem) {
  return problem.size < 100 ? Support::yes() : Support::no("size must be below 100");
}
Support small_or_even(const Problem& problem) {
  return even_only(problem).ok() ? Support::yes() : small_only(problem);
}

const std::array kImpls{Impl{"wide", even_only}, Impl{"narrow", small_only},
                        Impl{"reference", small_or_even}};
std::span<const Impl> impls() { return kImpls; }

std::string_view selected(int size) { return select("amax", impls(), Problem{size}).name; }
Explanation explained(int size) { return explain_candidates("amax", impls(), Problem{size}); }

template <typename Action>
void expect_error(ErrorKind kind, const std::string& message, const Action& action) {
  try {
    action();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    EXPECT_EQ(std::string(error.what()), message);
  }
}

TEST(Select, TakesTheFirstThatSupportsTheProblem) {
  EXPECT_EQ(selected(4), "wide");
  EXPECT_EQ(selected(5), "narrow");
  EXPECT_EQ(selected(400), "wide");
}

TEST(Select, ListsEveryCandidateWithItsReasonIfNoneFits) {
  expect_error(ErrorKind::kUnsupported,
               "amax: no implementation takes 401 things\n"
               "  wide: size must be even\n"
               "  narrow: size must be below 100\n"
               "  reference: size must be below 100",
               [] { (void)selected(401); });
}

TEST(Explain, SaysWhyEachCandidateWasRefusedOrPassedOver) {
  const Explanation five = explained(5);
  EXPECT_EQ(five.op, "amax");
  EXPECT_EQ(five.problem, "5 things");
  EXPECT_EQ(five.chosen, "narrow");
  ASSERT_EQ(five.candidates.size(), 3U);
  EXPECT_EQ(five.candidates[0].name, "wide");
  EXPECT_FALSE(five.candidates[0].supported);
  EXPECT_EQ(five.candidates[0].reason, "size must be even");
  EXPECT_TRUE(five.candidates[1].supported);
  EXPECT_EQ(five.candidates[1].reason, "");
  EXPECT_TRUE(five.candidates[2].supported);
  EXPECT_EQ(five.candidates[2].reason, "passed over: narrow comes first");
}

TEST(Explain, ChoosesNothingIfNothingFits) {
  const Explanation none = explained(401);
  EXPECT_EQ(none.chosen, "");
  for (const Candidate& candidate : none.candidates) EXPECT_FALSE(candidate.supported);
}

TEST(ForcedImplementation, IsTakenInsteadOfTheFirst) {
  const Forced forced("amax:reference");
  EXPECT_EQ(selected(4), "reference");
  const Explanation four = explained(4);
  EXPECT_EQ(four.chosen, "reference");
  EXPECT_EQ(four.candidates[0].reason, "passed over: NARROWFLOAT_FORCE pins reference");
  EXPECT_EQ(four.candidates[1].reason, "passed over: NARROWFLOAT_FORCE pins reference");
  EXPECT_EQ(four.candidates[2].reason, "");
}

TEST(ForcedImplementation, ThatRefusesIsAnErrorAndNeverAFallback) {
  const Forced forced("amax:wide");
  EXPECT_EQ(selected(4), "wide");
  try {
    (void)selected(5);
    FAIL() << "fell back";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_NE(message.find("wide: size must be even"), std::string::npos) << message;
    EXPECT_NE(message.find("narrow: passed over: NARROWFLOAT_FORCE pins wide"), std::string::npos)
        << message;
  }
  EXPECT_EQ(explained(5).chosen, "");
}

TEST(ForcedImplementation, WithAnUnknownNameIsAnErrorThatListsTheNames) {
  const Forced forced("amax:fast");
  const std::string message =
      "NARROWFLOAT_FORCE: amax has no implementation \"fast\"; it has wide, narrow, reference";
  expect_error(ErrorKind::kInvalidArgument, message, [] { (void)selected(4); });
  expect_error(ErrorKind::kInvalidArgument, message, [] { (void)explained(4); });
}

TEST(ForcedImplementation, ConcernsItsOperationOnly) {
  const Forced forced("quantize:reference,relayout:x");
  EXPECT_EQ(selected(4), "wide");
  EXPECT_EQ(forced_implementation("quantize"), "reference");
  EXPECT_EQ(forced_implementation("relayout"), "x");
  EXPECT_EQ(forced_implementation("amax"), "");
}

TEST(ForcedImplementation, TakesTheLastOfSeveralPinsOfOneOperation) {
  const Forced forced("amax:wide,amax:narrow");
  EXPECT_EQ(selected(4), "narrow");
}

TEST(ForcedImplementation, IsAbsentWithoutTheVariableAndForAnEmptyOne) {
  unsetenv("NARROWFLOAT_FORCE");
  EXPECT_EQ(forced_implementation("amax"), "");
  const Forced forced("");
  EXPECT_EQ(forced_implementation("amax"), "");
  EXPECT_EQ(selected(4), "wide");
}

TEST(ForcedImplementation, RefusesAnOperationThatDoesNotExist) {
  const Forced forced("quantise:cpu_reference");
  std::string message =
      "NARROWFLOAT_FORCE: there is no operation \"quantise\"; expected one of quantize";
  for (const std::string_view op : std::span(kOperations).subspan(1)) {
    message += ", " + std::string(op);
  }
  expect_error(ErrorKind::kInvalidArgument, message, [] { (void)forced_implementation("amax"); });
}

TEST(ForcedImplementation, RefusesAMalformedSettingWhateverTheOperation) {
  for (const std::string setting :
       {"amax", ":narrow", "amax:", "amax:narrow,rest", ",amax:narrow"}) {
    const Forced forced(setting.c_str());
    expect_error(ErrorKind::kInvalidArgument,
                 "NARROWFLOAT_FORCE: expected op:implementation[,op:implementation...], got \"" +
                     setting + "\"",
                 [] { (void)forced_implementation("amax"); });
  }
}

TEST(CpuOnly, RefusesOtherDevices) {
  EXPECT_TRUE(cpu_only(Device{}).ok());
  const Support gpu = cpu_only(Device{DeviceType::kCuda, 0});
  EXPECT_FALSE(gpu.ok());
  EXPECT_EQ(gpu.reason(), "runs on the CPU only");
}

}  // namespace
}  // namespace narrowfloat

// The table of activations, the factories, and which parameters each activation takes.
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "narrowfloat/activation.h"
#include "support/expect_error.h"

namespace narrowfloat::testing {
namespace {

TEST(Activations, AreListedInTheOrderOfTheEnumAndParseByName) {
  ASSERT_EQ(all_activations().size(), 11U);
  int index = 0;
  for (const ActivationInfo& info : all_activations()) {
    EXPECT_EQ(static_cast<int>(info.id), index++);
    EXPECT_EQ(parse_activation(info.name), info.id);
    EXPECT_EQ(name(info.id), info.name);
    EXPECT_EQ(info.is_gated,
              info.formula.find('g') != std::string_view::npos && info.id != ActivationKind::kSilu)
        << info.name;
  }
  EXPECT_EQ(name(ActivationKind::kSwigluStep), "swiglu_step");
  expect_error(ErrorKind::kInvalidArgument, {"activation", "swiglu, swiglu_step", "\"swish\""},
               [] { parse_activation("swish"); });
  expect_error(ErrorKind::kInvalidArgument, {"activation", "11"},
               [] { activation_info(static_cast<ActivationKind>(11)); });
}

TEST(Activations, FactoriesSetWhatTheySay) {
  const Activation oai = Activation::swiglu_oai(1.702F, 1.0F, 7.0F);
  EXPECT_EQ(oai.kind, ActivationKind::kSwiglu);
  EXPECT_EQ(oai.alpha.value, 1.702F);
  EXPECT_EQ(oai.beta.value, 1.0F);
  EXPECT_EQ(oai.limit_gate.value, 7.0F);
  EXPECT_EQ(oai.limit_up.value, 7.0F);
  const Activation situ = Activation::situ(4.0F, 25.0F);
  EXPECT_EQ(situ.kind, ActivationKind::kSituGlu);
  EXPECT_EQ(situ.alpha.value, 4.0F);
  EXPECT_EQ(situ.beta.value, 25.0F);
  EXPECT_EQ(situ.limit_up.value, Activation::kNoLimit);
  const Activation step = Activation::swiglu_step(7.0F);
  EXPECT_EQ(step.kind, ActivationKind::kSwigluStep);
  EXPECT_EQ(step.alpha.value, 1.0F);
  EXPECT_EQ(step.limit_gate.value, 7.0F);
  EXPECT_EQ(step.limit_up.value, 7.0F);
  EXPECT_EQ(Activation::plain(ActivationKind::kRelu2).kind, ActivationKind::kRelu2);
  for (const Activation& legal : {oai, situ, step, Activation::swiglu()}) {
    EXPECT_NO_THROW(check_activation(legal));
  }
}

// A value that an activation would ignore is a mistake of the caller.
TEST(Activations, RefuseEveryParameterTheyDoNotRead) {
  struct Parameter {
    const char* name;
    PerExpert Activation::*member;
    bool ActivationInfo::*is_read;
  };
  const std::vector<Parameter> parameters{
      {"activation.alpha", &Activation::alpha, &ActivationInfo::has_alpha},
      {"activation.beta", &Activation::beta, &ActivationInfo::has_beta},
      {"activation.limit_gate", &Activation::limit_gate, &ActivationInfo::has_limits},
      {"activation.limit_up", &Activation::limit_up, &ActivationInfo::has_limits}};
  const float value = 3.0F;
  for (const ActivationInfo& info : all_activations()) {
    for (const Parameter& parameter : parameters) {
      for (const PerExpert& given :
           {PerExpert(value), PerExpert(TensorView::contiguous(&value, DType::kF32, {1}))}) {
        Activation activation{.kind = info.id};
        if (info.id == ActivationKind::kSituGlu) activation = Activation::situ(4.0F, 25.0F);
        EXPECT_NO_THROW(check_activation(activation)) << info.name;
        activation.*parameter.member = given;
        if (info.*parameter.is_read) {
          EXPECT_NO_THROW(check_activation(activation)) << info.name << " " << parameter.name;
        } else {
          expect_error(ErrorKind::kInvalidArgument,
                       {parameter.name, std::string(info.name), "does not read"},
                       [&] { check_activation(activation); });
        }
      }
    }
  }
}

TEST(Activations, RefuseValuesWithoutMeaning) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto refused = [](const Activation& activation, const char* argument) {
    expect_error(ErrorKind::kInvalidArgument, {argument, "expected", "got"},
                 [&] { check_activation(activation); });
  };
  refused(Activation::swiglu_oai(kInfinity, 0, 7), "activation.alpha");
  refused(Activation::swiglu_oai(1, kNan, 7), "activation.beta");
  refused(Activation::swiglu_oai(1, 0, -1), "activation.limit_gate");
  refused(Activation::swiglu_step(kNan), "activation.limit_gate");
  refused({.kind = ActivationKind::kSwiglu, .limit_up = -0.5F}, "activation.limit_up");
  refused(Activation::situ(0, 25), "activation.alpha");
  refused(Activation::situ(4, -1), "activation.beta");
  // Two incompatible sets of scales are in use, so none is a default.
  refused(Activation::plain(ActivationKind::kSituGlu), "activation.beta");
  EXPECT_NO_THROW(check_activation(Activation::swiglu_oai(-1, -2, 0)));
}

}  // namespace
}  // namespace narrowfloat::testing

// Whole checkpoints quantized by every convention: what is written, and that it depends on nothing
// but the input and the settings.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/conventions/convention.h"
#include "narrowfloat/runtime.h"
#include "unit/layers/model_files.h"

namespace narrowfloat {
namespace {

namespace fs = std::filesystem;

const std::string kUp = "model.layers.0.mlp.experts.0.up_proj.weight";
const std::string kGate = "model.layers.0.mlp.experts.0.gate_proj.weight";

QuantizeCheckpointOptions to(Convention convention) {
  QuantizeCheckpointOptions options;
  options.to = convention;
  return options;
}

class QuantizeCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override { write_model(source_, tiny_model()); }

  TempDir dir_;
  const std::string source_ = dir_ / "model";
  const std::string target_ = dir_ / "out";
};

TEST_F(QuantizeCheckpoint, WritesTheTensorsOfEveryConvention) {
  for (const ConventionInfo& info : written_conventions()) {
    const ConventionSpec* spec = &convention_spec(info.id);
    const std::string target = dir_ / spec->info.name;
    quantize_checkpoint(source_, target, to(spec->info.id));
    const Checkpoint written(target);
    for (const TensorSpec& part : stored_parts(*spec, "model.layers.0.self_attn.q_proj.", 48, 64)) {
      const CheckpointTensor* tensor = written.find(part.name);
      ASSERT_NE(tensor, nullptr) << part.name;
      EXPECT_EQ(tensor->info.dtype, part.dtype) << part.name;
      EXPECT_EQ(tensor->info.shape, part.shape) << part.name;
    }
    const Checkpoint source(source_);
    for (const char* name :
         {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight",
          "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias"}) {
      EXPECT_EQ(stored_bytes(written, name), stored_bytes(source, name)) << name;
    }
  }
}

TEST_F(QuantizeCheckpoint, RecognisesWhatItWrote) {
  for (const ConventionInfo& info : written_conventions()) {
    const std::string target = dir_ / info.name;
    const CheckpointReport report = quantize_checkpoint(source_, target, to(info.id));
    int quantized = 0;
    for (const LogicalTensor& tensor : recognise(Checkpoint(target))) {
      if (!tensor.convention) continue;
      ++quantized;
      EXPECT_EQ(*tensor.convention, info.id) << tensor.name;
    }
    EXPECT_EQ(quantized, 9) << info.name;
    EXPECT_EQ(std::count_if(report.tensors.begin(), report.tensors.end(),
                            [](const TensorReport& r) { return r.action == "quantize"; }),
              9);
  }
}

TEST_F(QuantizeCheckpoint, KeepsTheConfigAndAddsTheQuantization) {
  quantize_checkpoint(source_, target_, to(Convention::kNvfp4CompressedTensors));
  const std::string text = read_file(target_ + "/config.json");
  EXPECT_NE(text.find("\"rms_norm_eps\": 1e-06"), std::string::npos) << text;
  const auto config = nlohmann::json::parse(text);
  const auto& quantization = config.at("quantization_config");
  EXPECT_EQ(quantization.at("format"), "nvfp4-pack-quantized");
  EXPECT_EQ(quantization.at("ignore"), nlohmann::json({"lm_head", "model.layers.0.mlp.gate"}));
  EXPECT_EQ(names_in(target_),
            (std::vector<std::string>{"config.json", "model.safetensors", "tokenizer.json"}));
}

TEST_F(QuantizeCheckpoint, ModelOptHasItsSecondConfig) {
  write_file(source_ + "/hf_quant_config.json", "{\"quantization\": {\"quant_algo\": null}}");
  quantize_checkpoint(source_, target_, to(Convention::kNvfp4ModelOpt));
  const auto config = nlohmann::json::parse(read_file(target_ + "/hf_quant_config.json"));
  EXPECT_EQ(config.at("quantization").at("quant_algo"), "W4A16_NVFP4");
  EXPECT_EQ(config.at("quantization").at("exclude_modules").size(), 2U);
}

TEST_F(QuantizeCheckpoint, LeavesNoStaleSecondConfig) {
  write_file(source_ + "/hf_quant_config.json", "{\"quantization\": {\"quant_algo\": null}}");
  quantize_checkpoint(source_, target_, to(Convention::kMxfp4CompressedTensors));
  EXPECT_FALSE(fs::exists(target_ + "/hf_quant_config.json"));
}

TEST_F(QuantizeCheckpoint, NamesATiedHeadInTheIgnoreList) {
  std::vector<TestTensor> tensors = tiny_model();
  std::erase_if(tensors, [](const TestTensor& t) { return t.spec.name == "lm_head.weight"; });
  write_model(dir_ / "tied", tensors);
  quantize_checkpoint(dir_ / "tied", target_, to(Convention::kFp8Block));
  const auto config = nlohmann::json::parse(read_file(target_ + "/config.json"));
  EXPECT_EQ(config.at("quantization_config").at("modules_to_not_convert").at(0), "lm_head");
}

TEST_F(QuantizeCheckpoint, MergedWeightsShareTheLargestMaximum) {
  quantize_checkpoint(source_, target_, to(Convention::kNvfp4CompressedTensors));
  const Checkpoint written(target_);
  const auto global = [&](const std::string& weight) {
    return stored_as<float>(written, weight.substr(0, weight.size() - 6) + "weight_global_scale")
        .at(0);
  };
  float amax = 0;
  for (const std::string& name : {kGate, kUp}) {
    for (const float value : weight_values(name, 48 * 64)) {
      amax = std::max(amax, std::abs(bf16_to_float(float_to_bf16(value))));
    }
  }
  EXPECT_EQ(global(kGate), 2688.0F / amax);
  EXPECT_EQ(global(kUp), 2688.0F / amax);
  const std::string attention = "model.layers.0.self_attn.";
  EXPECT_EQ(global(attention + "q_proj.weight"), global(attention + "v_proj.weight"));
  EXPECT_NE(global(kGate), global("model.layers.0.mlp.experts.1.gate_proj.weight"));
}

TEST_F(QuantizeCheckpoint, FiguresEqualADirectComputation) {
  QuantizeCheckpointOptions options = to(Convention::kNvfp4CompressedTensors);
  const CheckpointReport report = quantize_checkpoint(source_, target_, options);
  dequantize_checkpoint(target_, dir_ / "back", {.dtype = DType::kF32});
  const Checkpoint back(dir_ / "back");
  const std::vector<float> y = stored_as<float>(back, kUp);
  const std::vector<float> x = weight_values(kUp, 48 * 64);
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double xi = bf16_to_float(float_to_bf16(x[i]));
    error += (xi - y[i]) * (xi - y[i]);
    norm += xi * xi;
  }
  for (const TensorReport& tensor : report.tensors) {
    if (tensor.name != kUp) continue;
    ASSERT_TRUE(tensor.figures.has_value());
    EXPECT_NEAR(tensor.figures->mse, error / static_cast<double>(x.size()), 1e-15);
    EXPECT_NEAR(tensor.figures->sqnr_db, 10 * std::log10(norm / error), 1e-9);
    EXPECT_GT(tensor.figures->clipped_percent, 0);
    EXPECT_EQ(tensor.target_bytes, 48U * 32 + 48 * 4 + 4);
  }
  EXPECT_GT(report.total.sqnr_db, 17);
  EXPECT_EQ(report.total.elements, 5 * 48 * 64 + 2 * 48 * 64 + 2 * 16 * 64);
}

TEST_F(QuantizeCheckpoint, TheMemoryBudgetDoesNotShowInTheBytes) {
  const std::vector<TestTensor> tensors = tiny_model(700, 96);
  write_model(dir_ / "large", tensors);
  for (const ConventionInfo& info : written_conventions()) {
    QuantizeCheckpointOptions options = to(info.id);
    const std::string all = dir_ / (std::string(info.name) + "-all");
    const std::string pieces = dir_ / (std::string(info.name) + "-pieces");
    const CheckpointReport with_all = quantize_checkpoint(dir_ / "large", all, options);
    options.max_memory_bytes = 300'000;
    const CheckpointReport with_pieces = quantize_checkpoint(dir_ / "large", pieces, options);
    EXPECT_LE(with_pieces.peak_buffer_bytes, 300'000U);
    EXPECT_LT(with_pieces.peak_buffer_bytes, with_all.peak_buffer_bytes);
    expect_same_files(all, pieces);
    EXPECT_EQ(with_all.total.mse, with_pieces.total.mse);
  }
}

// Larger than what is measured at a time.
TEST_F(QuantizeCheckpoint, WideWeightsNeedAFewRowsOnly) {
  write_model(dir_ / "wide", {bf16_tensor("a.fc.weight", {130, 16384})});
  for (const ConventionInfo& info : written_conventions()) {
    QuantizeCheckpointOptions options = to(info.id);
    const std::string all = dir_ / (std::string(info.name) + "-all");
    const std::string pieces = dir_ / (std::string(info.name) + "-pieces");
    const CheckpointReport with_all = quantize_checkpoint(dir_ / "wide", all, options);
    options.max_memory_bytes = info.id == Convention::kFp8Block ? 11'800'000 : 200'000;
    const CheckpointReport with_pieces = quantize_checkpoint(dir_ / "wide", pieces, options);
    EXPECT_LE(with_pieces.peak_buffer_bytes, options.max_memory_bytes) << info.name;
    expect_same_files(all, pieces);
    EXPECT_EQ(with_all.total.mse, with_pieces.total.mse) << info.name;
    EXPECT_EQ(with_all.total.cosine, with_pieces.total.cosine) << info.name;
    EXPECT_EQ(with_all.total.clipped_percent, with_pieces.total.clipped_percent) << info.name;
    EXPECT_EQ(with_all.total.max_abs_index, with_pieces.total.max_abs_index) << info.name;
    // The dequantizer's figures are the measured ones.
    dequantize_checkpoint(all, all + "-back", {.dtype = DType::kF32});
    EXPECT_EQ(diff_checkpoints(dir_ / "wide", all + "-back").total.mse, with_all.total.mse);
    EXPECT_EQ(diff_checkpoints(dir_ / "wide", all).total.mse, with_all.total.mse);
    fs::remove_all(all + "-back");
  }
}

TEST_F(QuantizeCheckpoint, ThreadsAndRepetitionDoNotShowInTheBytes) {
  for (const ConventionInfo& info : written_conventions()) {
    const std::string first = dir_ / (std::string(info.name) + "-1");
    const std::string second = dir_ / (std::string(info.name) + "-2");
    set_num_threads(1);
    quantize_checkpoint(source_, first, to(info.id));
    set_num_threads(2);
    quantize_checkpoint(source_, second, to(info.id));
    set_num_threads(0);
    expect_same_files(first, second);
  }
}

TEST_F(QuantizeCheckpoint, TooSmallABudgetNamesTheMinimum) {
  QuantizeCheckpointOptions options;
  options.max_memory_bytes = 1'000;
  expect_error(ErrorKind::kInvalidArgument,
               "option max_memory_bytes: 1000 bytes are too few; at least",
               [&] { quantize_checkpoint(source_, target_, options); });
}

TEST_F(QuantizeCheckpoint, OddShapesWork) {
  for (const auto& [rows, cols] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 32}, {130, 2880}, {129, 160}, {3, 96}}) {
    const std::string source = dir_ / fmt::format("odd-{}-{}", rows, cols);
    write_model(source, {bf16_tensor("a.fc.weight", {rows, cols}),
                         f32_tensor("b.fc.weight", {rows, cols})});
    for (const ConventionInfo& info : written_conventions()) {
      const std::string target = fmt::format("{}-{}", source, info.name);
      const CheckpointReport report = quantize_checkpoint(source, target, to(info.id));
      EXPECT_GT(report.total.cosine, 0.98) << target;
      EXPECT_EQ(recognise(Checkpoint(target)).size(), 2U);
      dequantize_checkpoint(target, target + "-back", {});
      EXPECT_FALSE(diff_checkpoints(source, target + "-back").equal);
    }
  }
}

TEST_F(QuantizeCheckpoint, ShardsKeepCompanionsTogether) {
  QuantizeCheckpointOptions options = to(Convention::kNvfp4CompressedTensors);
  options.max_shard_bytes = 5'000;
  const CheckpointReport report = quantize_checkpoint(source_, target_, options);
  const Checkpoint written(target_);
  EXPECT_GT(written.shards().size(), 2U);
  EXPECT_TRUE(written.warnings().empty());
  EXPECT_EQ(report.files.back(), "model.safetensors.index.json");
  for (const LogicalTensor& tensor : recognise(written)) {
    for (const std::string& part : tensor.parts) {
      EXPECT_EQ(written.find(part)->shard, written.find(tensor.parts[0])->shard) << part;
    }
  }
  quantize_checkpoint(source_, dir_ / "one", to(Convention::kNvfp4CompressedTensors));
  EXPECT_TRUE(diff_checkpoints(target_, dir_ / "one").equal);
}

TEST_F(QuantizeCheckpoint, ShardedSourcesShareScalesAcrossShards) {
  const std::string sharded = dir_ / "sharded";
  fs::create_directory(sharded);
  std::vector<TestTensor> first = tiny_model();
  std::vector<TestTensor> second;
  std::erase_if(first, [&](const TestTensor& tensor) {
    const bool moves = tensor.spec.name == kUp || tensor.spec.name == "lm_head.weight";
    if (moves) second.push_back(tensor);
    return moves;
  });
  write_model_file(sharded + "/model-00001-of-00002.safetensors", first);
  write_model_file(sharded + "/model-00002-of-00002.safetensors", second);
  nlohmann::json map;
  for (const TestTensor& t : first) map[t.spec.name] = "model-00001-of-00002.safetensors";
  for (const TestTensor& t : second) map[t.spec.name] = "model-00002-of-00002.safetensors";
  write_file(sharded + "/model.safetensors.index.json",
             nlohmann::json{{"metadata", nlohmann::json::object()}, {"weight_map", map}}.dump());
  write_file(sharded + "/config.json", kTinyConfig);
  quantize_checkpoint(sharded, target_, to(Convention::kNvfp4ModelOpt));
  EXPECT_FALSE(fs::exists(target_ + "/model.safetensors.index.json"));
  quantize_checkpoint(source_, dir_ / "one", to(Convention::kNvfp4ModelOpt));
  const CheckpointDiff diff = diff_checkpoints(target_, dir_ / "one");
  for (const TensorDiff& tensor : diff.tensors) EXPECT_EQ(tensor.status, "identical");
}

TEST_F(QuantizeCheckpoint, SingleFilesCarryTheirDeclaration) {
  write_model_file(dir_ / "in.safetensors", tiny_model(), {{"format", "pt"}, {"title", "mine"}});
  const CheckpointReport report = quantize_checkpoint(
      dir_ / "in.safetensors", dir_ / "out.safetensors", to(Convention::kMxfp8CompressedTensors));
  const SafetensorsReader file(dir_ / "out.safetensors");
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.metadata().at("title"), "mine");
  EXPECT_EQ(file.metadata().at("narrowfloat.convention"), "mxfp8-ct");
  EXPECT_EQ(file.metadata().at("narrowfloat.settings"), "math=exact mx_scale=up scale_search=amax");
  EXPECT_EQ(report.target_bytes, file.file_size());
  EXPECT_EQ(report.files, std::vector<std::string>{"out.safetensors"});
}

TEST_F(QuantizeCheckpoint, DryRunPlansWithoutWriting) {
  QuantizeCheckpointOptions options;
  options.dry_run = true;
  const CheckpointReport plan = quantize_checkpoint(source_, target_, options);
  EXPECT_EQ(names_in(dir_.path()), std::vector<std::string>{"model"});
  options.dry_run = false;
  const CheckpointReport done = quantize_checkpoint(source_, target_, options);
  EXPECT_EQ(plan.files, done.files);
  EXPECT_EQ(plan.target_bytes, done.target_bytes);
  EXPECT_EQ(plan.peak_buffer_bytes, done.peak_buffer_bytes);
  EXPECT_EQ(done.target_bytes, fs::file_size(target_ + "/model.safetensors"));
  ASSERT_EQ(plan.file_bytes.size(), plan.files.size());
  for (size_t i = 0; i < plan.files.size(); ++i) {
    EXPECT_EQ(plan.file_bytes[i], fs::file_size(target_ + "/" + plan.files[i])) << plan.files[i];
  }
}

// Finished shards stay beside the target for a run that resumes, and nothing has its name.
TEST_F(QuantizeCheckpoint, CancellingLeavesFinishedShardsAlone) {
  QuantizeCheckpointOptions options;
  options.max_shard_bytes = 5'000;
  for (const int tensors_before : {0, 3, 12}) {
    int asked = 0;
    options.cancelled = [&] { return asked++ >= tensors_before; };
    const CheckpointReport report = quantize_checkpoint(source_, target_, options);
    EXPECT_TRUE(report.cancelled);
    EXPECT_TRUE(report.files.empty());
    std::vector<std::string> names{"model"};
    if (tensors_before == 12)
      names.insert(names.end(), {"out.narrowfloat.lock", "out.narrowfloat.partial"});
    EXPECT_EQ(names_in(dir_.path()), names);
  }
}

TEST_F(QuantizeCheckpoint, CancellingRightBeforeTheCommitPublishesNothing) {
  write_model_file(dir_ / "in.safetensors", tiny_model());
  const std::vector<std::string> before = names_in(dir_.path());
  for (const bool is_file : {false, true}) {
    const std::string source = is_file ? dir_ / "in.safetensors" : source_;
    const std::string target = is_file ? dir_ / "out.safetensors" : target_;
    QuantizeCheckpointOptions options;
    int asked = 0;
    options.cancelled = [&] { return ++asked < 0; };
    EXPECT_FALSE(quantize_checkpoint(source, target, options).cancelled);
    fs::remove_all(target);
    const int last = std::exchange(asked, 0);
    options.cancelled = [&] { return ++asked == last; };
    EXPECT_TRUE(quantize_checkpoint(source, target, options).cancelled);
    EXPECT_FALSE(fs::exists(target));
    EXPECT_EQ(fs::remove_all(target_ + ".narrowfloat.partial") > 0, !is_file);
    EXPECT_EQ(fs::remove(target_ + ".narrowfloat.lock"), !is_file);
    EXPECT_EQ(names_in(dir_.path()), before);
  }
}

TEST_F(QuantizeCheckpoint, ReportsProgressUpToTheEnd) {
  QuantizeCheckpointOptions options;
  uint64_t last = 0;
  uint64_t total = 1;
  options.progress = [&](const ProgressEvent& event) {
    EXPECT_GT(event.done_bytes, last);
    last = event.done_bytes;
    total = event.total_bytes;
  };
  quantize_checkpoint(source_, target_, options);
  EXPECT_EQ(last, total);
}

TEST_F(QuantizeCheckpoint, NonFiniteWeightsStopIt) {
  std::vector<float> values = weight_values("w", 64 * 32);
  values[5 * 32 + 7] = std::numeric_limits<float>::infinity();
  write_model(dir_ / "bad", {bf16_tensor("a.fc.weight", {64, 32}, values)});
  expect_error(ErrorKind::kCorruptData, "'a.fc.weight' has a NaN or infinity at [5, 7]",
               [&] { quantize_checkpoint(dir_ / "bad", target_, {}); });
  EXPECT_FALSE(fs::exists(target_));
  QuantizeCheckpointOptions options;
  options.keep_nonfinite = true;
  const CheckpointReport report = quantize_checkpoint(dir_ / "bad", target_, options);
  EXPECT_EQ(report.total.nonfinite, 1);
  ASSERT_EQ(report.warnings.size(), 1U);
  EXPECT_NE(report.warnings[0].find("'a.fc.weight': 1 of 2048 elements are NaN or infinite"),
            std::string::npos);
}

TEST_F(QuantizeCheckpoint, PassesWarningsOn) {
  fs::create_directory(source_ + "/onnx");
  fs::create_directory(source_ + "/.cache");
  write_file(source_ + "/pytorch_model.bin", "pickle");
  write_file(source_ + "/config.json", R"({"modules_to_not_convert": ["vision"]})");
  QuantizeCheckpointOptions options;
  options.include = {"*embed_tokens*"};
  const std::vector<std::string> warnings = quantize_checkpoint(source_, target_, options).warnings;
  ASSERT_EQ(warnings.size(), 4U);
  EXPECT_NE(warnings[0].find("pytorch_model.bin"), std::string::npos);
  EXPECT_TRUE(warnings[1].ends_with("subdirectories are not copied: onnx")) << warnings[1];
  EXPECT_NE(warnings[2].find("'vision'"), std::string::npos);
  EXPECT_NE(warnings[3].find("embed_tokens"), std::string::npos);
}

TEST_F(QuantizeCheckpoint, WarnsOfAMissingConfig) {
  fs::remove(source_ + "/config.json");
  const CheckpointReport report = quantize_checkpoint(source_, target_, {});
  ASSERT_EQ(report.warnings.size(), 1U);
  EXPECT_NE(report.warnings[0].find("no config.json"), std::string::npos);
  EXPECT_EQ(dequantize_checkpoint(target_, dir_ / "back", {}).warnings.size(), 1U);
}

TEST_F(QuantizeCheckpoint, TheFingerprintDependsOnTheSourcesHeadersAlone) {
  const auto fingerprint = [&](const std::string& source) {
    quantize_checkpoint(source, source + "-q", {});
    return Checkpoint(source + "-q").shards()[0].metadata().at("narrowfloat.source");
  };
  const std::string expected = fingerprint(source_);
  EXPECT_EQ(expected.size(), std::string("xxh64:").size() + 16);
  write_model(dir_ / "elsewhere", tiny_model());
  EXPECT_EQ(fingerprint(dir_ / "elsewhere"), expected);
  write_model(dir_ / "larger", tiny_model(64));
  EXPECT_NE(fingerprint(dir_ / "larger"), expected);
}

TEST_F(QuantizeCheckpoint, RefusesQuantizedSources) {
  quantize_checkpoint(source_, target_, {});
  expect_error(ErrorKind::kInvalidArgument, "is quantized already (nvfp4-ct); dequantize",
               [&] { quantize_checkpoint(target_, dir_ / "again", {}); });
}

TEST_F(QuantizeCheckpoint, RefusesOptionsOfOtherFormats) {
  QuantizeCheckpointOptions options = to(Convention::kNvfp4CompressedTensors);
  options.mx_scale = Ue8m0Rounding::kEven;
  expect_error(ErrorKind::kInvalidArgument, "mx_scale: 'even' is for mxfp4 and mxfp8",
               [&] { quantize_checkpoint(source_, target_, options); });
  options = to(Convention::kFp8Block);
  options.scale_search = ScaleSearch::kFourOverSix;
  expect_error(ErrorKind::kInvalidArgument, "scale_search: 4over6 is for nvfp4",
               [&] { quantize_checkpoint(source_, target_, options); });
}

TEST_F(QuantizeCheckpoint, RefusesToWriteACopy) {
  QuantizeCheckpointOptions options;
  options.exclude = {"*"};
  expect_error(ErrorKind::kInvalidArgument, "no tensor is left to quantize to nvfp4-ct",
               [&] { quantize_checkpoint(source_, target_, options); });
}

TEST_F(QuantizeCheckpoint, SearchAndRoundingChangeTheError) {
  const auto sqnr = [&](QuantizeCheckpointOptions options) {
    options.dry_run = false;
    options.force = true;
    return quantize_checkpoint(source_, target_, options).total.sqnr_db;
  };
  QuantizeCheckpointOptions search = to(Convention::kNvfp4CompressedTensors);
  const double amax = sqnr(search);
  search.scale_search = ScaleSearch::kFourOverSix;
  EXPECT_GT(sqnr(search), amax + 0.3);
  QuantizeCheckpointOptions even = to(Convention::kMxfp4CompressedTensors);
  const double up = sqnr(even);
  even.mx_scale = Ue8m0Rounding::kEven;
  EXPECT_NE(sqnr(even), up);
}

}  // namespace
}  // namespace narrowfloat

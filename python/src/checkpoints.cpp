// Checkpoints: quantize, dequantize, convert, compare, and one Mixture-of-Experts layer of one.
#include <optional>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "narrowfloat/check.h"
#include "narrowfloat/checkpoint.h"
#include "narrowfloat/error.h"
#include "narrowfloat/moe_checkpoint.h"
#include "python/src/bindings.h"
#include "python/src/choices.h"
#include "python/src/moe_arguments.h"

namespace narrowfloat::python {
namespace {

using nb::literals::operator""_a;

// Ctrl-C between two tensors. The exception that Python has ready is raised after the work.
bool interrupted() {
  const nb::gil_scoped_acquire locked;
  return PyErr_CheckSignals() != 0;
}

// Runs without the interpreter's lock, then raises what a signal left.
template <typename Function>
auto run_unlocked(Function function) {
  auto result = [&] {
    const nb::gil_scoped_release unlocked;
    return function();
  }();
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return result;
}

// The options that quantize and convert spell as words.
template <typename Options>
void read_words(Options& options, const NamedTexts& words) {
  for (const auto& [key, value] : words) {
    const auto name = nb::cast<std::string>(key);
    const auto text = nb::cast<std::string>(value);
    if (name == "to") options.to = parse_convention(text);
    if (name == "math") options.math = parse_math_mode(text);
    if (name == "mx_scale") options.mx_scale = parse_ue8m0_rounding(text);
    if (name == "scale_search") {
      options.scale_search =
          parse_choice<ScaleSearch>(name, text,
                                    {{"amax", ScaleSearch::kAmax},
                                     {"four_over_six", ScaleSearch::kFourOverSix},
                                     {"full", ScaleSearch::kFull}});
    }
  }
}

CheckpointReport run_convert(const std::string& source, const std::string& target,
                             ConvertCheckpointOptions options, const NamedTexts& words) {
  read_words(options, words);
  options.cancelled = interrupted;
  return run_unlocked([&] { return convert_checkpoint(source, target, options); });
}

CheckpointReport run_quantize(const std::string& source, const std::string& target,
                              QuantizeCheckpointOptions options, const NamedTexts& words) {
  read_words(options, words);
  options.cancelled = interrupted;
  return run_unlocked([&] { return quantize_checkpoint(source, target, options); });
}

CheckpointReport run_dequantize(const std::string& source, const std::string& target,
                                const std::string& dtype, DequantizeCheckpointOptions options) {
  options.dtype = parse_choice<DType>(
      "dtype", dtype,
      {{"bfloat16", DType::kBF16}, {"float16", DType::kF16}, {"float32", DType::kF32}});
  options.cancelled = interrupted;
  return run_unlocked([&] { return dequantize_checkpoint(source, target, options); });
}

// A terminal shows these lines; all figures are attributes.
nb::str to_repr(const ErrorFigures& self) {
  return nb::str(
             "ErrorFigures({} elements, SQNR {:.2f} dB, cosine {:.6f}, norm ratio {:.6f}, "
             "largest error {:.3g} at {})")
      .format(self.elements, self.sqnr_db, self.cosine, self.norm_ratio, self.max_abs,
              self.max_abs_index);
}

nb::str to_repr(const TensorReport& self) {
  return nb::str("TensorReport({!r}, {}, {:,} -> {:,} bytes)")
      .format(self.name, self.action, self.source_bytes, self.target_bytes);
}

nb::str to_repr(const CheckpointReport& self) {
  return nb::str("CheckpointReport({} tensors, {:,} -> {:,} bytes, {} warnings, {})")
      .format(self.tensors.size(), self.source_bytes, self.target_bytes, self.warnings.size(),
              to_repr(self.total));
}

nb::str to_repr(const TensorDiff& self) {
  return nb::str("TensorDiff({!r}, {})").format(self.name, self.status);
}

nb::str to_repr(const CheckpointDiff& self) {
  return nb::str("CheckpointDiff({}, {} tensors, {})")
      .format(self.equal ? "equal" : "different", self.tensors.size(), to_repr(self.total));
}

template <typename Report>
void bind_repr(nb::class_<Report> type) {
  type.def("__repr__", [](const Report& self) { return to_repr(self); });
}

void bind_reprs(nb::module_& module) {
  bind_repr(nb::borrow<nb::class_<ErrorFigures>>(module.attr("ErrorFigures")));
  bind_repr(nb::borrow<nb::class_<TensorReport>>(module.attr("TensorReport")));
  bind_repr(nb::borrow<nb::class_<CheckpointReport>>(module.attr("CheckpointReport")));
  bind_repr(nb::borrow<nb::class_<TensorDiff>>(module.attr("TensorDiff")));
  bind_repr(nb::borrow<nb::class_<CheckpointDiff>>(module.attr("CheckpointDiff")));
}

void bind_reports(nb::module_& module) {
  nb::class_<ErrorFigures>(module, "ErrorFigures", "How two tensors differ.")
      .def(nb::init<>())
      .def_rw("elements", &ErrorFigures::elements)
      .def_rw("mse", &ErrorFigures::mse)
      .def_rw("relative_error", &ErrorFigures::relative_error, "Frobenius.")
      .def_rw("sqnr_db", &ErrorFigures::sqnr_db, "Infinite for no error.")
      .def_rw("cosine", &ErrorFigures::cosine)
      .def_rw("norm_ratio", &ErrorFigures::norm_ratio)
      .def_rw("max_abs", &ErrorFigures::max_abs)
      .def_rw("max_abs_index", &ErrorFigures::max_abs_index)
      .def_rw("clipped_percent", &ErrorFigures::clipped_percent,
              "None where the compared side is not quantized.")
      .def_rw("flushed_percent", &ErrorFigures::flushed_percent)
      .def_rw("nonfinite", &ErrorFigures::nonfinite, "Elements left out of the sums.");
  nb::class_<ConversionFigures>(module, "ConversionFigures",
                                "What a conversion changed in a weight.")
      .def_ro("is_exact", &ConversionFigures::is_exact, "Everything means the same as before.")
      .def_ro("blocks", &ConversionFigures::blocks, "Runs of columns that share a scale.")
      .def_ro("exact_blocks", &ConversionFigures::exact_blocks,
              "Blocks with the same values; None where a dry run does not know.")
      .def_ro("global_scale_change", &ConversionFigures::global_scale_change,
              "Relative rounding of the reciprocal of a global scale.");
  nb::class_<TensorReport>(module, "TensorReport", "What became of one tensor.")
      .def_ro("name", &TensorReport::name)
      .def_ro("action", &TensorReport::action, "quantize, dequantize, convert, requantize or copy.")
      .def_ro("reason", &TensorReport::reason, "Why it is copied, or not converted exactly.")
      .def_ro("format", &TensorReport::format, "The convention of a weight that is quantized.")
      .def_ro("shape", &TensorReport::shape)
      .def_ro("source_bytes", &TensorReport::source_bytes)
      .def_ro("target_bytes", &TensorReport::target_bytes)
      .def_ro("figures", &TensorReport::figures)
      .def_ro("conversion", &TensorReport::conversion, "Of the weights that were converted.");
  nb::class_<CheckpointReport>(module, "CheckpointReport", "What became of a checkpoint.")
      .def_ro("tensors", &CheckpointReport::tensors)
      .def_ro("source_bytes", &CheckpointReport::source_bytes)
      .def_ro("target_bytes", &CheckpointReport::target_bytes)
      .def_ro("total", &CheckpointReport::total, "Over the quantized tensors.")
      .def_ro("seconds", &CheckpointReport::seconds)
      .def_ro("files", &CheckpointReport::files)
      .def_ro("notes", &CheckpointReport::notes, "How formats were chosen.")
      .def_ro("warnings", &CheckpointReport::warnings);
  nb::class_<StoredDiff>(module, "StoredDiff", "Two quantized weights of one format, as stored.")
      .def_ro("codes", &StoredDiff::codes)
      .def_ro("different_codes", &StoredDiff::different_codes)
      .def_ro("scales", &StoredDiff::scales)
      .def_ro("different_scales", &StoredDiff::different_scales)
      .def_ro("a_global_scale", &StoredDiff::a_global_scale, "The factor, however it is stored.")
      .def_ro("b_global_scale", &StoredDiff::b_global_scale);
  nb::class_<OriginalDiff>(module, "OriginalDiff", "One side beside the original.")
      .def_ro("figures", &OriginalDiff::figures)
      .def_ro("misrounded_codes", &OriginalDiff::misrounded_codes,
              "Codes that are not the nearest ones for their scales.");
  nb::class_<TensorDiff>(module, "TensorDiff", "One tensor of two checkpoints.")
      .def_ro("name", &TensorDiff::name)
      .def_ro("status", &TensorDiff::status,
              "identical, same values, different, only in A, only in B, or shape differs.")
      .def_ro("detail", &TensorDiff::detail)
      .def_ro("figures", &TensorDiff::figures, "A is the reference.")
      .def_ro("stored", &TensorDiff::stored, "Where both sides have one format.")
      .def_ro("a_original", &TensorDiff::a_original, "Where the original is known.")
      .def_ro("b_original", &TensorDiff::b_original);
  nb::class_<CheckpointDiff>(module, "CheckpointDiff", "Two checkpoints, tensor by tensor.")
      .def_ro("tensors", &CheckpointDiff::tensors)
      .def_ro("total", &CheckpointDiff::total)
      .def_ro("equal", &CheckpointDiff::equal, "No tensor differs in its values.")
      .def_ro("warnings", &CheckpointDiff::warnings);
}

CheckpointCheck run_check(const std::string& path, const std::string& against, bool scales_only) {
  CheckCheckpointOptions options;
  options.against = against;
  options.scales_only = scales_only;
  options.cancelled = interrupted;
  return run_unlocked([&] { return check_checkpoint(path, options); });
}

CheckpointReport run_fix(const std::string& source, const std::string& target, bool force) {
  FixCheckpointOptions options;
  options.force = force;
  options.cancelled = interrupted;
  return run_unlocked([&] { return fix_checkpoint(source, target, options); });
}

void bind_check(nb::module_& module) {
  nb::class_<Finding>(module, "Finding", "What is wrong with a checkpoint.")
      .def_ro("id", &Finding::id, "NF-C001 and so on: docs/checkpoints.md.")
      .def_prop_ro(
          "severity", [](const Finding& self) { return std::string(name(self.severity)); },
          "error, warning or note.")
      .def_ro("tensor", &Finding::tensor, "Empty: the checkpoint as a whole.")
      .def_ro("message", &Finding::message)
      .def("__repr__", [](const Finding& self) {
        return nb::str("Finding({}, {}, {!r}, {!r})")
            .format(std::string(name(self.severity)), self.id, self.tensor, self.message);
      });
  nb::class_<CodeStatistics>(module, "CodeStatistics", "How codes and scales use their range.")
      .def_ro("codes", &CodeStatistics::codes)
      .def_ro("codes_at_maximum", &CodeStatistics::codes_at_maximum)
      .def_ro("code_counts", &CodeStatistics::code_counts, "FP4: by code; FP8: by exponent field.")
      .def_ro("blocks", &CodeStatistics::blocks)
      .def_ro("zero_blocks", &CodeStatistics::zero_blocks)
      .def_ro("low_blocks", &CodeStatistics::low_blocks)
      .def_ro("zero_scales", &CodeStatistics::zero_scales)
      .def_ro("denormal_scales", &CodeStatistics::denormal_scales)
      .def_ro("saturated_scales", &CodeStatistics::saturated_scales)
      .def_ro("scale_exponents", &CodeStatistics::scale_exponents, "Counts by floor(log2(scale)).")
      .def_ro("global_scale", &CodeStatistics::global_scale, "As stored.");
  nb::class_<Requantization>(module, "Requantization", "The source quantized again, and the file.")
      .def_prop_ro("is_identical", &Requantization::is_identical)
      .def_ro("different_codes", &Requantization::different_codes)
      .def_ro("different_scales", &Requantization::different_scales)
      .def_ro("has_other_global_scale", &Requantization::has_other_global_scale);
  nb::class_<CheckedTensor>(module, "CheckedTensor", "One tensor of a checked checkpoint.")
      .def_prop_ro("name", [](const CheckedTensor& self) { return self.tensor.name; })
      .def_ro("tensor", &CheckedTensor::tensor)
      .def_ro("statistics", &CheckedTensor::statistics)
      .def_ro("figures", &CheckedTensor::figures, "Against the source.")
      .def_ro("requantization", &CheckedTensor::requantization);
  nb::class_<CheckpointCheck>(module, "CheckpointCheck", "What a check found.")
      .def_prop_ro("passed", &CheckpointCheck::passed, "No error and no warning.")
      .def_ro("findings", &CheckpointCheck::findings)
      .def_ro("tensors", &CheckpointCheck::tensors)
      .def_ro("total", &CheckpointCheck::total)
      .def_ro("metadata", &CheckpointCheck::metadata)
      .def_ro("read_bytes", &CheckpointCheck::read_bytes)
      .def("__repr__", [](const CheckpointCheck& self) {
        return nb::str("CheckpointCheck({}, {} findings in {} tensors)")
            .format(self.passed() ? "passed" : "failed", self.findings.size(), self.tensors.size());
      });
  module.def("check_checkpoint", &run_check, "path"_a, "against"_a, "scales_only"_a);
  module.def("fix_checkpoint", &run_fix, "source"_a, "target"_a, "force"_a);
}

struct LoadedLayer {
  LoadedMoe moe;
};

nb::dlpack::dtype numpy_type(const TensorView& view) {
  auto code = nb::dlpack::dtype_code::UInt;
  if (view.dtype == DType::kF32) code = nb::dlpack::dtype_code::Float;
  return {static_cast<uint8_t>(code), static_cast<uint8_t>(bits(view.dtype)), 1};
}

// A view of memory that `owner` keeps. bfloat16 is uint16, one-byte types are uint8.
nb::object as_numpy(const TensorView& view, nb::handle owner) {
  if (view.is_absent()) return nb::none();
  std::vector<size_t> shape(view.shape.begin(), view.shape.begin() + view.rank);
  const nb::ndarray<nb::numpy, nb::ro> array(view.data, shape.size(), shape.data(), owner, nullptr,
                                             numpy_type(view));
  return nb::cast(array);
}

nb::object as_numpy(const ScaleView& view, nb::handle owner) {
  if (view.data == nullptr) return nb::none();
  const bool is_float = view.type == ScaleType::kF32;
  return as_numpy(TensorView::contiguous(view.data, is_float ? DType::kF32 : DType::kU8,
                                         {view.batch, view.capacity / view.batch}),
                  owner);
}

nb::object as_python(const PerExpert& factor, nb::handle owner) {
  if (factor.values.is_absent()) return nb::cast(factor.value);
  return as_numpy(factor.values, owner);
}

NamedValues weights_of(nb::handle self) {
  const MoeWeights& weights = nb::cast<const LoadedLayer&>(self).moe.weights();
  NamedValues parts;
  parts["w1"] = as_numpy(weights.w1.values, self);
  parts["w1_scales"] = as_numpy(weights.w1.scales, self);
  parts["w2"] = as_numpy(weights.w2.values, self);
  parts["w2_scales"] = as_numpy(weights.w2.scales, self);
  parts["scale_layout"] = std::string(name(weights.w1.scales.layout));
  parts["up_scale"] = as_python(weights.up_scale, self);
  parts["gate_scale"] = as_python(weights.gate_scale, self);
  parts["down_scale"] = as_python(weights.down_scale, self);
  parts["inter_multiplier"] = as_python(weights.inter_multiplier, self);
  parts["input_multiplier"] =
      weights.input_multiplier ? as_python(*weights.input_multiplier, self) : nb::none();
  parts["bias1"] = as_numpy(weights.bias1, self);
  parts["bias2"] = as_numpy(weights.bias2, self);
  return parts;
}

LoadedLayer load_layer(const std::string& path, int64_t layer,
                       const std::optional<std::string>& mode, LoadMoeOptions options) {
  if (mode) options.mode = parse_moe_mode(*mode);
  return run_unlocked([&] { return LoadedLayer{LoadedMoe(Checkpoint(path), layer, options)}; });
}

void bind_layer(nb::module_& module) {
  nb::class_<LoadMoeOptions>(module, "LoadMoeOptions")
      .def(nb::init<>())
      .def_rw("input_amax", &LoadMoeOptions::input_amax)
      .def_rw("inter_amax", &LoadMoeOptions::inter_amax)
      .def_rw("expert_offset", &LoadMoeOptions::expert_offset)
      .def_rw("local_experts", &LoadMoeOptions::local_experts)
      .def_rw("places", &LoadMoeOptions::places)
      .def_rw("tensor_rank", &LoadMoeOptions::tensor_rank)
      .def_rw("tensor_ranks", &LoadMoeOptions::tensor_ranks);
  module.def(
      "tensor_shard",
      [](int64_t inter, const std::string& mode, int rank, int ranks) {
        const TensorShard shard = tensor_shard(inter, parse_moe_mode(mode), rank, ranks);
        return std::pair(shard.offset, shard.count);
      },
      "inter"_a, "mode"_a, "rank"_a, "ranks"_a,
      "Offset and count of a rank's columns of a layer's intermediate, in tensor parallelism.\n\n"
      "inter: that of the whole layer. Parts are equal, and cuts lie at blocks of the mode's\n"
      "weights; ValueError names the counts of ranks that fit.");
  nb::class_<LoadedLayer>(module, "LoadedMoe")
      .def_static("load", &load_layer, "path"_a, "layer"_a, "mode"_a.none(), "options"_a)
      .def_prop_ro("config",
                   [](const LoadedLayer& self) {
                     return PythonMoeConfig{
                         .config = self.moe.config(), .reference = {}, .arrays = {}};
                   })
      .def_prop_ro("weights", &weights_of)
      .def_prop_ro(
          "stored_format",
          [](const LoadedLayer& self) { return std::string(name(self.moe.stored_format())); })
      .def_prop_ro("router_weight",
                   [](nb::handle self) {
                     return as_numpy(nb::cast<const LoadedLayer&>(self).moe.router_weight(), self);
                   })
      .def_prop_ro("router_logit_bias",
                   [](nb::handle self) {
                     return as_numpy(nb::cast<const LoadedLayer&>(self).moe.router_logit_bias(),
                                     self);
                   })
      .def_prop_ro("router_bias", [](nb::handle self) {
        return as_numpy(nb::cast<const LoadedLayer&>(self).moe.router_bias(), self);
      });
  nb::class_<LogicalTensor>(module, "LogicalTensor", "A tensor as a model sees it.")
      .def_ro("name", &LogicalTensor::name)
      .def_ro("shape", &LogicalTensor::shape)
      .def_prop_ro(
          "convention",
          [](const LogicalTensor& self) -> std::optional<std::string> {
            if (!self.convention) return std::nullopt;
            return std::string(convention_info(*self.convention).name);
          },
          "None where it is not quantized.")
      .def_prop_ro("format",
                   [](const LogicalTensor& self) -> std::optional<std::string> {
                     if (!self.convention) return std::nullopt;
                     return std::string(stored_format(convention_info(*self.convention)));
                   })
      .def_ro("parts", &LogicalTensor::parts, "Names of the stored tensors.")
      .def_ro("is_transposed", &LogicalTensor::is_transposed);
  module.def(
      "recognise_checkpoint",
      [](const std::string& path) {
        return run_unlocked([&] { return recognise(Checkpoint(path)); });
      },
      "path"_a);
  module.def(
      "moe_layers",
      [](const std::string& path) {
        return run_unlocked([&] { return moe_layers(Checkpoint(path)); });
      },
      "path"_a);
}

}  // namespace

void bind_checkpoints(nb::module_& module) {
  bind_reports(module);
  bind_reprs(module);
  bind_layer(module);
  bind_check(module);
  nb::class_<QuantizeRule>(module, "QuantizeRule");
  nb::class_<QuantizeRecipe>(module, "QuantizeRecipe")
      .def_ro("include", &QuantizeRecipe::include)
      .def_ro("exclude", &QuantizeRecipe::exclude)
      .def_ro("rules", &QuantizeRecipe::rules);
  module.def("parse_rule", &parse_rule, "text"_a);
  module.def("read_recipe", &read_recipe, "path"_a);
  module.def("parse_recipe", &parse_recipe, "text"_a);
  module.def("read_activation_amax", &read_activation_amax, "path"_a);
  nb::class_<QuantizeCheckpointOptions>(module, "QuantizeCheckpointOptions")
      .def(nb::init<>())
      .def_rw("include", &QuantizeCheckpointOptions::include)
      .def_rw("exclude", &QuantizeCheckpointOptions::exclude)
      .def_rw("rules", &QuantizeCheckpointOptions::rules)
      .def_rw("target_bits", &QuantizeCheckpointOptions::target_bits)
      .def_rw("activation_amax", &QuantizeCheckpointOptions::activation_amax)
      .def_rw("kept_files", &QuantizeCheckpointOptions::kept_files)
      .def_rw("gptq", &QuantizeCheckpointOptions::gptq)
      .def_rw("activation_moments", &QuantizeCheckpointOptions::activation_moments)
      .def_rw("keep_nonfinite", &QuantizeCheckpointOptions::keep_nonfinite)
      .def_rw("max_memory_bytes", &QuantizeCheckpointOptions::max_memory_bytes)
      .def_rw("max_shard_bytes", &QuantizeCheckpointOptions::max_shard_bytes)
      .def_rw("dry_run", &QuantizeCheckpointOptions::dry_run)
      .def_rw("force", &QuantizeCheckpointOptions::force)
      .def_rw("resume", &QuantizeCheckpointOptions::resume)
      .def_rw("measure", &QuantizeCheckpointOptions::measure);
  nb::class_<ConvertCheckpointOptions>(module, "ConvertCheckpointOptions")
      .def(nb::init<>())
      .def_rw("exact_only", &ConvertCheckpointOptions::exact_only)
      .def_rw("lossy", &ConvertCheckpointOptions::lossy)
      .def_rw("keep_formats", &ConvertCheckpointOptions::keep_formats)
      .def_rw("max_memory_bytes", &ConvertCheckpointOptions::max_memory_bytes)
      .def_rw("dry_run", &ConvertCheckpointOptions::dry_run)
      .def_rw("force", &ConvertCheckpointOptions::force)
      .def_rw("resume", &ConvertCheckpointOptions::resume);
  module.def("convert_checkpoint", &run_convert, "source"_a, "target"_a, "options"_a, "words"_a);
  nb::class_<DequantizeCheckpointOptions>(module, "DequantizeCheckpointOptions")
      .def(nb::init<>())
      .def_rw("max_memory_bytes", &DequantizeCheckpointOptions::max_memory_bytes)
      .def_rw("max_shard_bytes", &DequantizeCheckpointOptions::max_shard_bytes)
      .def_rw("force", &DequantizeCheckpointOptions::force)
      .def_rw("resume", &DequantizeCheckpointOptions::resume);
  module.def("quantize_checkpoint", &run_quantize, "source"_a, "target"_a, "options"_a, "words"_a);
  module.def("dequantize_checkpoint", &run_dequantize, "source"_a, "target"_a, "dtype"_a,
             "options"_a);
  module.def(
      "diff_checkpoints",
      [](const std::string& a, const std::string& b, const std::string& original) {
        return run_unlocked([&] { return diff_checkpoints(a, b, {.original = original}); });
      },
      "a"_a, "b"_a, "original"_a);
}

}  // namespace narrowfloat::python

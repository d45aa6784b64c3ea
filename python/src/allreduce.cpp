// All-reduce workspaces: a rank of one, its calls, and what the machine offers for them.
#include "narrowfloat/allreduce.h"

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "narrowfloat/error.h"
#include "python/src/bindings.h"
#include "python/src/choices.h"
#include "python/src/moe_arguments.h"
#include "python/src/rank_groups.h"
#include "python/src/streams.h"
#include "python/src/words.h"

namespace narrowfloat::python {
namespace {

using nb::literals::operator""_a;

// The enumerator with a name, of those from 0 to `last`.
template <typename Enum>
Enum parse_name(std::string_view argument, std::string_view text, Enum last) {
  std::string words;
  for (int number = 0; number <= static_cast<int>(last); ++number) {
    const auto value = static_cast<Enum>(number);
    if (name(value) == text) return value;
    words += words.empty() ? "" : ", ";
    words += name(value);
  }
  throw Error(ErrorKind::kInvalidArgument, std::string(argument) + ": expected one of " + words +
                                               "; got \"" + std::string(text) + "\"");
}

// A call without its tensors and their extents; Python keeps it for calls of the same kind.
struct AllReduceSettings {
  AllReduceProblem problem;
  float eps = 1e-6F;
  float weight_bias = 0.0F;
  float routed_scaling = 1.0F;
  AllReduceTrigger trigger = AllReduceTrigger::kAtEnd;
  bool programmatic_launch = false;

  void set(std::string_view member, std::string_view text);
};

void AllReduceSettings::set(std::string_view member, std::string_view text) {
  if (member == "pattern") {
    problem.pattern = parse_name(member, text, AllReducePattern::kNormNvfp4PerToken);
  } else if (member == "quantization") {
    problem.moe_quantization = parse_name(member, text, AllReduceQuantization::kMxfp4);
  } else if (member == "scale_layout") {
    problem.scale_layout = parse_scale_layout(text);
  } else if (member == "accumulate") {
    problem.accumulation = parse_choice<AllReduceAccumulation>(
        member, text,
        {{"float32", AllReduceAccumulation::kFp32}, {"element", AllReduceAccumulation::kElement}});
  } else if (member == "exactness") {
    problem.exactness = parse_choice<AllReduceExactness>(
        member, text, {{"exact", AllReduceExactness::kExact}, {"fast", AllReduceExactness::kFast}});
  } else if (member == "algorithm") {
    problem.algorithm = parse_name(member, text, AllReduceAlgorithm::kReference);
  } else if (member == "trigger") {
    trigger = parse_choice<AllReduceTrigger>(
        member, text,
        {{"at_end", AllReduceTrigger::kAtEnd}, {"after_push", AllReduceTrigger::kAfterPush}});
  } else {
    throw_unknown_member(member);
  }
}

constexpr NamedView<AllReduceArgs> kAllReduceInputs[] = {
    {"input", &AllReduceArgs::input},
    {"residual_in", &AllReduceArgs::residual_in},
    {"gamma", &AllReduceArgs::gamma},
    {"global_scale", &AllReduceArgs::global_scale}};
constexpr NamedView<AllReduceMoe> kAllReduceMoeInputs[] = {
    {"expert_rows", &AllReduceMoe::expert_rows},
    {"expert_scales", &AllReduceMoe::expert_scales},
    {"num_experts", &AllReduceMoe::num_experts},
    {"token_input", &AllReduceMoe::token_input},
    {"permuted_rows", &AllReduceMoe::permuted_rows},
    {"slot_to_row", &AllReduceMoe::slot_to_row},
    {"slot_weights", &AllReduceMoe::slot_weights},
    {"shared_expert", &AllReduceMoe::shared_expert}};
constexpr NamedView<AllReduceArgs> kAllReduceOutputs[] = {
    {"ar_out", &AllReduceArgs::ar_out},       {"residual_out", &AllReduceArgs::residual_out},
    {"norm_out", &AllReduceArgs::norm_out},   {"quant_out", &AllReduceArgs::quant_out},
    {"scale_out", &AllReduceArgs::scale_out}, {"row_scale_out", &AllReduceArgs::row_scale_out}};

// All leading axes of a dense tensor together are its rows.
void merge_rows(TensorView& view) {
  if (view.rank < 1 || view.rank == 2 || !is_dense(view)) return;
  const int64_t cols = view.shape[static_cast<size_t>(view.rank) - 1];
  int64_t rows = 1;
  for (size_t axis = 0; axis + 1 < static_cast<size_t>(view.rank); ++axis) rows *= view.shape[axis];
  view.rank = 2;
  view.shape = {rows, cols};
  view.strides = {cols, 1};
}

void merge_all_rows(AllReduceArgs& args) {
  for (TensorView* const view :
       {&args.input, &args.residual_in, &args.ar_out, &args.residual_out, &args.norm_out,
        &args.quant_out, &args.moe.token_input, &args.moe.shared_expert}) {
    merge_rows(*view);
  }
}

// The extents are those of the tensor that each pattern has.
AllReduceProblem problem_of(const AllReduceSettings& settings, const AllReduceArgs& args) {
  AllReduceProblem problem = settings.problem;
  const auto extent = [](const TensorView& view, int axis) {
    return view.rank > axis ? view.shape[static_cast<size_t>(axis)] : 0;
  };
  const bool is_reduction = problem.pattern == AllReducePattern::kMoeReduction;
  const bool is_finalize = problem.pattern == AllReducePattern::kMoeFinalize;
  const TensorView& rows = is_finalize    ? args.moe.permuted_rows
                           : is_reduction ? args.moe.token_input
                                          : args.input;
  problem.tokens = extent(is_finalize ? args.moe.slot_to_row : rows, 0);
  problem.hidden = extent(rows, 1);
  problem.element = rows.dtype;
  return problem;
}

// One rank's workspace, which one thread at a time may use.
class PythonWorkspace {
 public:
  explicit PythonWorkspace(AllReduceWorkspace workspace) : workspace_(std::move(workspace)) {}

  [[nodiscard]] const AllReduceWorkspace& get() const { return workspace_; }

  // Runs `use` on the workspace without the interpreter's lock.
  template <typename Use>
  auto exclusively(Use&& use) {
    if (is_used_.exchange(true)) {
      throw Error(ErrorKind::kInvalidArgument,
                  "workspace: another thread is in a call on it; calls on one workspace must not "
                  "overlap");
    }
    const std::unique_ptr<std::atomic<bool>, void (*)(std::atomic<bool>*)> release(
        &is_used_, [](std::atomic<bool>* flag) { flag->store(false); });
    const nb::gil_scoped_release unlocked;
    return use(workspace_);
  }

 private:
  AllReduceWorkspace workspace_;
  std::atomic<bool> is_used_ = false;
};

std::string run_allreduce(PythonWorkspace& self, const AllReduceSettings& settings,
                          const NamedArrays& inputs, const NamedArrays& moe_inputs,
                          const NamedArrays& outputs) {
  std::vector<Array> arrays;
  arrays.reserve(16);
  AllReduceArgs args;
  set_views(inputs, kAllReduceInputs, args, arrays, false);
  set_views(moe_inputs, kAllReduceMoeInputs, args.moe, arrays, false);
  set_views(outputs, kAllReduceOutputs, args, arrays, true);
  merge_all_rows(args);
  args.eps = settings.eps;
  args.weight_bias = settings.weight_bias;
  args.moe.routed_scaling = settings.routed_scaling;
  args.trigger = settings.trigger;
  const AllReduceProblem problem = problem_of(settings, args);
  Stream stream = arrays.empty() ? Stream{} : current_stream(arrays.front());
  stream.programmatic_launch |= settings.programmatic_launch;
  const AllReduceAlgorithm algorithm = self.exclusively(
      [&](AllReduceWorkspace& workspace) { return allreduce(workspace, problem, args, stream); });
  return std::string(name(algorithm));
}

std::unique_ptr<PythonWorkspace> create_workspace(std::shared_ptr<Bootstrap> group,
                                                  const AllReduceWorkspaceOptions& options) {
  const nb::gil_scoped_release unlocked;
  return std::make_unique<PythonWorkspace>(AllReduceWorkspace::create(std::move(group), options));
}

std::vector<std::unique_ptr<PythonWorkspace>> create_local_workspaces(
    int ranks, const AllReduceWorkspaceOptions& options) {
  const nb::gil_scoped_release unlocked;
  std::vector<std::unique_ptr<PythonWorkspace>> workspaces;
  for (AllReduceWorkspace& workspace : AllReduceWorkspace::create_local(ranks, options)) {
    workspaces.push_back(std::make_unique<PythonWorkspace>(std::move(workspace)));
  }
  return workspaces;
}

// extents: tokens, hidden. engines: peer memory, NCCL. capacities: one-shot, two-shot.
Explanation explain_call(const AllReduceSettings& settings, std::pair<int64_t, int64_t> extents,
                         std::string_view dtype, int ranks, const std::string& device,
                         std::pair<bool, bool> engines, std::pair<int64_t, int64_t> capacities) {
  AllReduceExplainRequest request{.ranks = ranks,
                                  .device = parse_device(device),
                                  .problem = settings.problem,
                                  .has_peer_memory = engines.first,
                                  .has_nccl = engines.second,
                                  .capacities = {capacities.first, capacities.second}};
  request.problem.tokens = extents.first;
  request.problem.hidden = extents.second;
  request.problem.element = parse_float_type("dtype", dtype);
  return explain_allreduce(request);
}

void bind_settings(nb::module_& module) {
  nb::class_<AllReduceSettings>(module, "AllReduceSettings")
      .def(nb::init<>())
      .def("set", &AllReduceSettings::set, "member"_a, "text"_a)
      .def_prop_rw(
          "group_size", [](const AllReduceSettings& self) { return self.problem.group; },
          [](AllReduceSettings& self, int columns) { self.problem.group = columns; })
      .def_rw("eps", &AllReduceSettings::eps)
      .def_rw("weight_bias", &AllReduceSettings::weight_bias)
      .def_rw("routed_scaling", &AllReduceSettings::routed_scaling)
      .def_rw("programmatic_launch", &AllReduceSettings::programmatic_launch)
      .def_prop_ro(
          "quantization",
          [](const AllReduceSettings& self) {
            return std::string(name(quantization_of(self.problem)));
          },
          "Of the pattern, or what was set for a MoE pattern.");
}

void bind_workspace_options(nb::module_& module) {
  nb::class_<AllReduceWorkspaceOptions>(module, "AllReduceOptions")
      .def("__init__",
           [](AllReduceWorkspaceOptions* self, const std::string& device, std::string_view dtype) {
             new (self) AllReduceWorkspaceOptions{.device = parse_device(device),
                                                  .element = parse_float_type("dtype", dtype)};
           })
      .def_rw("oneshot_bytes", &AllReduceWorkspaceOptions::oneshot_bytes)
      .def_rw("twoshot_bytes", &AllReduceWorkspaceOptions::twoshot_bytes)
      .def_rw("nccl_bytes", &AllReduceWorkspaceOptions::nccl_bytes)
      .def_rw("use_nccl", &AllReduceWorkspaceOptions::use_nccl)
      .def("set_transport",
           [](AllReduceWorkspaceOptions& self, std::string_view text) {
             self.transport = parse_name("transport", text, AllReduceTransport::kNone);
           })
      .def("set_deadline", [](AllReduceWorkspaceOptions& self,
                              double seconds) { self.deadline = parse_deadline(seconds); })
      .def("set_agreement", [](AllReduceWorkspaceOptions& self, std::string_view text) {
        self.agreement =
            parse_choice<AllReduceAgreement>("agreement", text,
                                             {{"first_call", AllReduceAgreement::kFirstCall},
                                              {"every_call", AllReduceAgreement::kEveryCall},
                                              {"never", AllReduceAgreement::kNever}});
      });
}

void bind_workspace(nb::module_& module) {
  const auto call = [](auto method) {
    return [method](PythonWorkspace& self) { self.exclusively(method); };
  };
  nb::class_<PythonWorkspace>(module, "AllReduceWorkspace")
      .def_static("create", &create_workspace, "group"_a, "options"_a)
      .def_static("create_local", &create_local_workspaces, "ranks"_a, "options"_a)
      .def("run", &run_allreduce, "settings"_a, "inputs"_a, "moe_inputs"_a, "outputs"_a)
      .def("check_error", [](const PythonWorkspace& self) { self.get().check_error(); })
      .def("reset", call([](AllReduceWorkspace& workspace) { workspace.reset(); }))
      .def("destroy", call([](AllReduceWorkspace& workspace) { workspace.destroy(); }))
      .def(
          "fits",
          [](const PythonWorkspace& self, int64_t tokens, int64_t hidden, std::string_view dtype) {
            return self.get().fits(tokens, hidden, parse_float_type("dtype", dtype));
          },
          "tokens"_a, "hidden"_a, "dtype"_a)
      .def_prop_ro("rank", [](const PythonWorkspace& self) { return self.get().rank(); })
      .def_prop_ro("ranks", [](const PythonWorkspace& self) { return self.get().ranks(); })
      .def_prop_ro("device",
                   [](const PythonWorkspace& self) { return to_string(self.get().device()); })
      .def_prop_ro(
          "transport",
          [](const PythonWorkspace& self) { return std::string(name(self.get().transport())); })
      .def_prop_ro(
          "oneshot_bytes",
          [](const PythonWorkspace& self) { return self.get().capacities().oneshot_bytes; })
      .def_prop_ro(
          "twoshot_bytes",
          [](const PythonWorkspace& self) { return self.get().capacities().twoshot_bytes; })
      .def_prop_ro("nccl_bytes",
                   [](const PythonWorkspace& self) { return self.get().nccl_bytes(); });
}

void bind_machine(nb::module_& module) {
  nb::class_<NcclInfo>(module, "NcclInfo", "The NCCL that all-reduce workspaces on GPUs use.")
      .def_ro("found", &NcclInfo::found)
      .def_ro("version", &NcclInfo::version)
      .def_ro("path", &NcclInfo::path, "The file that the loader found.")
      .def_ro("reason", &NcclInfo::reason, "Why none was found.");
  nb::class_<GpuLink>(module, "GpuLink", "How one GPU reaches another one.")
      .def_ro("source", &GpuLink::from)
      .def_ro("target", &GpuLink::to)
      .def_ro("peer_access", &GpuLink::peer_access)
      .def_ro("native_atomics", &GpuLink::native_atomics)
      .def_ro("performance_rank", &GpuLink::performance_rank, "0 is the best of this machine.");
  module.def("nccl_info", &nccl_info, "The NCCL that all-reduce workspaces on GPUs use.");
  module.def("gpu_links", &gpu_links,
             "Every ordered pair of GPUs; empty without CUDA or with fewer than two.");
}

}  // namespace

void bind_allreduce(nb::module_& module) {
  bind_settings(module);
  bind_workspace_options(module);
  bind_workspace(module);
  bind_machine(module);
  module.def("explain_allreduce", &explain_call, "settings"_a, "extents"_a, "dtype"_a, "ranks"_a,
             "device"_a, "engines"_a, "capacities"_a);
  module.def(
      "default_allreduce_capacities",
      [](int ranks) {
        const AllReduceCapacities defaults = default_allreduce_capacities(ranks);
        return std::pair(defaults.oneshot_bytes, defaults.twoshot_bytes);
      },
      "ranks"_a);
  module.def(
      "allreduce_patterns",
      [] {
        std::vector<std::string> names;
        for (int number = 0; number < kNumAllReducePatterns; ++number) {
          names.emplace_back(name(static_cast<AllReducePattern>(number)));
        }
        return names;
      },
      "Names of the patterns of AllReduce.");
}

}  // namespace narrowfloat::python

// Expert parallelism: ranks that exchange tokens and results.
#include "narrowfloat/expert_parallel.h"

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "narrowfloat/error.h"
#include "narrowfloat/expert_placement.h"
#include "python/src/bindings.h"
#include "python/src/choices.h"
#include "python/src/moe_arguments.h"
#include "python/src/rank_groups.h"
#include "python/src/streams.h"
#include "python/src/words.h"

namespace narrowfloat::python {
namespace {

using nb::literals::operator""_a;

// f(send, receive) of bytes.
using Function = nb::typed<nb::callable, nb::any(nb::any, nb::any)>;

// The configuration and options as Python fills them.
struct GroupOptions {
  ExpertParallelConfig config;
  ExpertParallelOptions options;

  void set_word(std::string_view member, std::string_view text);
  void set_all_to_all(Function function);
};

void GroupOptions::set_word(std::string_view member, std::string_view text) {
  if (member == "payload") {
    config.payload = parse_choice<RowFormat>(member, text,
                                             {{"bf16", RowFormat::kBf16},
                                              {"fp8_group", RowFormat::kFp8Group},
                                              {"mxfp8", RowFormat::kMxfp8},
                                              {"nvfp4_per_token", RowFormat::kNvfp4PerToken}});
  } else if (member == "order") {
    config.order = parse_combine_order(text);
  } else if (member == "result_dtype") {
    config.result_dtype = parse_float_type(member, text);
  } else if (member == "transport") {
    options.transport = parse_expert_transport(text);
  } else {
    throw_unknown_member(member);
  }
}

using ByteArray = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>;

// A view of memory that the function must not keep.
ByteArray as_array(const void* data, size_t size) {
  return ByteArray(const_cast<void*>(data), {size}, nb::none());
}

void GroupOptions::set_all_to_all(Function function) {
  options.all_to_all = [function = share_function(std::move(function))](
                           std::span<const std::byte> send, std::span<std::byte> receive) {
    const nb::gil_scoped_acquire locked;
    (*function)(as_array(send.data(), send.size()), as_array(receive.data(), receive.size()));
  };
}

CodedRows token_rows(nb::handle values, nb::handle scales, nb::handle row_scale, RowFormat payload,
                     std::vector<Array>& arrays) {
  // Bytes are codes of the payload.
  const DType bytes_as = payload == RowFormat::kNvfp4PerToken ? DType::kU8 : DType::kF8E4M3;
  CodedRows rows;
  rows.values = arrays.emplace_back(input_array("hidden", values, bytes_as)).view;
  rows.scales = arrays.emplace_back(input_array("hidden_scales", scales, DType::kU8)).view;
  rows.row_scale = arrays.emplace_back(input_array("row_scale", row_scale)).view;
  return rows;
}

struct TokenSlots {
  TensorView ids;
  TensorView weights;
};

TokenSlots slots_of(nb::handle ids, nb::handle weights, std::vector<Array>& arrays) {
  return {.ids = arrays.emplace_back(input_array("ids", ids)).view,
          .weights = arrays.emplace_back(input_array("weights", weights)).view};
}

// Copies a dense tensor into an array of as many bytes.
void copy_out(const TensorView& from, const Array& to) {
  const int64_t bytes = from.num_elements() * bits(from.dtype) / 8;
  if (to.view.num_elements() * bits(to.view.dtype) / 8 != bytes || !is_dense(to.view)) {
    throw Error(ErrorKind::kInvalidArgument,
                "received: expected dense arrays of the sizes that "
                "dispatch() returns");
  }
  if (bytes > 0) std::memcpy(to.view.data, from.data, static_cast<size_t>(bytes));
}

// A tensor of torch over memory of the group on a GPU, which keeps the group alive.
using GroupTensor = nb::ndarray<nb::pytorch>;

nb::dlpack::dtype torch_type(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return {static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
    case DType::kF16:
      return {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
    case DType::kF32:
      return nb::dtype<float>();
    case DType::kI32:
      return nb::dtype<int32_t>();
    default:
      return nb::dtype<uint8_t>();  // Codes and scales.
  }
}

nb::object group_tensor(nb::handle group, const TensorView& view) {
  if (view.is_absent()) return nb::none();
  std::array<size_t, 4> shape{};
  for (size_t axis = 0; axis < static_cast<size_t>(view.rank); ++axis) {
    shape[axis] = static_cast<size_t>(view.shape[axis]);
  }
  return nb::cast(GroupTensor(view.data, static_cast<size_t>(view.rank), shape.data(), group,
                              nullptr, torch_type(view.dtype), nb::device::cuda::value,
                              view.device.index));
}

// On a GPU: queues the dispatch, and returns tensors over what is received there.
NamedValues dispatch_on_gpu(nb::handle group, nb::handle hidden, nb::handle hidden_scales,
                            nb::handle row_scale, nb::handle ids, nb::handle weights) {
  auto& self = nb::cast<ExpertParallel&>(group);
  std::vector<Array> arrays;
  arrays.reserve(16);
  const CodedRows rows =
      token_rows(hidden, hidden_scales, row_scale, self.config().payload, arrays);
  const TokenSlots slots = slots_of(ids, weights, arrays);
  const Stream stream = current_stream(arrays.front());
  ReceivedTokens received;
  {
    const nb::gil_scoped_release unlocked;
    received = self.dispatch(rows, slots.ids, slots.weights, stream);
  }
  NamedValues found;
  found["hidden"] = group_tensor(group, received.rows.values);
  found["hidden_scales"] = group_tensor(group, received.rows.scales);
  found["row_scale"] = group_tensor(group, received.rows.row_scale);
  found["ids"] = group_tensor(group, received.ids);
  found["weights"] = group_tensor(group, received.weights);
  found["counts"] = group_tensor(group, received.counts);
  found["call"] = received.call;
  return found;
}

// The results' own memory is filled already.
void combine_on_gpu(ExpertParallel& self, uint64_t call, nb::handle out) {
  const Array output = output_array("out", out);
  const Stream stream = current_stream(output);
  const nb::gil_scoped_release unlocked;
  ReceivedTokens received;
  received.call = call;
  self.combine(received, output.view, stream);
}

uint64_t dispatch_tokens(ExpertParallel& self, nb::handle hidden, nb::handle hidden_scales,
                         nb::handle row_scale, nb::handle ids, nb::handle weights,
                         const NamedArrays& received_arrays) {
  std::vector<Array> arrays;
  arrays.reserve(16);
  const CodedRows rows =
      token_rows(hidden, hidden_scales, row_scale, self.config().payload, arrays);
  const TokenSlots slots = slots_of(ids, weights, arrays);
  std::vector<std::pair<std::string, Array>> outputs;
  for (const auto& [key, value] : received_arrays) {
    if (value.is_none()) continue;
    const auto name = nb::cast<std::string>(key);
    outputs.emplace_back(name, output_array(name, value, DType::kU8));
  }
  const nb::gil_scoped_release unlocked;
  const ReceivedTokens received = self.dispatch(rows, slots.ids, slots.weights);
  const auto view_of = [&](const std::string& name) -> const TensorView& {
    if (name == "hidden") return received.rows.values;
    if (name == "hidden_scales") return received.rows.scales;
    if (name == "row_scale") return received.rows.row_scale;
    if (name == "ids") return received.ids;
    if (name == "weights") return received.weights;
    if (name == "counts") return received.counts;
    throw_unknown_member(name);
  };
  for (const auto& [name, array] : outputs) copy_out(view_of(name), array);
  return received.call;
}

void combine_results(ExpertParallel& self, uint64_t call, nb::handle results, nb::handle out) {
  const Array given = input_array("results", results);
  const Array output = output_array("out", out);
  const TensorView area = self.results();
  const nb::gil_scoped_release unlocked;
  if (given.view.device.type != DeviceType::kCpu || given.view.dtype != area.dtype ||
      given.view.num_elements() != area.num_elements() || !is_dense(given.view)) {
    throw Error(ErrorKind::kInvalidArgument, "results: expected a dense " + to_string(area) +
                                                 " on the CPU, got " + to_string(given.view));
  }
  if (area.num_elements() > 0) {
    std::memcpy(area.data, given.view.data,
                static_cast<size_t>(area.num_elements() * bits(area.dtype) / 8));
  }
  ReceivedTokens received;
  received.call = call;
  self.combine(received, output.view);
}

void run_experts(ExpertParallel& self, const MoeLayer& layer, nb::handle hidden,
                 nb::handle hidden_scales, nb::handle row_scale, nb::handle ids, nb::handle weights,
                 nb::handle out, nb::handle workspace) {
  std::vector<Array> arrays;
  arrays.reserve(16);
  const CodedRows rows =
      token_rows(hidden, hidden_scales, row_scale, self.config().payload, arrays);
  const TokenSlots slots = slots_of(ids, weights, arrays);
  const Array output = output_array("out", out);
  const Array space = output_array("workspace", workspace, DType::kU8);
  const Stream stream = current_stream(output);
  const nb::gil_scoped_release unlocked;
  self.run(layer, rows, slots.ids, slots.weights, output.view, space.view, stream);
}

}  // namespace

void bind_expert_parallel(nb::module_& module) {
  nb::class_<GroupOptions> options(module, "ExpertParallelOptions");
  options.def(nb::init<>())
      .def(
          "set_device",
          [](GroupOptions& self, const std::string& device) {
            self.options.device = parse_device(device);
          },
          "device"_a)
      .def("set_word", &GroupOptions::set_word, "member"_a, "text"_a)
      .def("set_all_to_all", &GroupOptions::set_all_to_all, "function"_a)
      .def("set_deadline", [](GroupOptions& self, double seconds) {
        self.options.deadline = parse_deadline(seconds);
      });
  const auto number = [&](const char* name, auto ExpertParallelConfig::*field) {
    options.def_prop_rw(
        name, [field](const GroupOptions& self) { return self.config.*field; },
        [field](GroupOptions& self, decltype(ExpertParallelConfig{}.*field) value) {
          self.config.*field = value;
        });
  };
  number("hidden", &ExpertParallelConfig::hidden);
  number("experts", &ExpertParallelConfig::experts);
  number("top_k", &ExpertParallelConfig::top_k);
  number("max_tokens", &ExpertParallelConfig::max_tokens);
  options.def("set_places", [](GroupOptions& self, std::vector<int32_t> places) {
    self.config.places = std::move(places);
  });

  nb::class_<ExpertParallel>(module, "ExpertParallel")
      .def_static(
          "create",
          [](const std::shared_ptr<Bootstrap>& group, const GroupOptions& given) {
            const nb::gil_scoped_release unlocked;
            return std::make_unique<ExpertParallel>(
                ExpertParallel::create(group, given.config, given.options));
          },
          "group"_a, "options"_a)
      .def_static(
          "create_local",
          [](int ranks, const GroupOptions& given) {
            std::vector<std::unique_ptr<ExpertParallel>> made;
            for (ExpertParallel& rank : ExpertParallel::create_local(
                     ranks, given.config, given.options.deadline, given.options.device)) {
              made.push_back(std::make_unique<ExpertParallel>(std::move(rank)));
            }
            return made;
          },
          "ranks"_a, "options"_a)
      .def_prop_ro("rank", &ExpertParallel::rank)
      .def_prop_ro("ranks", &ExpertParallel::ranks)
      .def_prop_ro("transport",
                   [](const ExpertParallel& self) { return std::string(name(self.transport())); })
      .def_prop_ro("shard",
                   [](const ExpertParallel& self) {
                     const ExpertShard shard = self.shard();
                     return std::pair(shard.offset, shard.count);
                   })
      .def_prop_ro(
          "is_on_gpu",
          [](const ExpertParallel& self) { return self.device().type == DeviceType::kCuda; })
      .def_prop_ro("max_rows", &ExpertParallel::max_rows)
      .def_prop_ro("memory_bytes", &ExpertParallel::memory_bytes)
      .def("required_workspace", &ExpertParallel::required_workspace, "layer"_a)
      .def("dispatch", &dispatch_tokens, "hidden"_a, "hidden_scales"_a.none(), "row_scale"_a.none(),
           "ids"_a, "weights"_a, "received"_a)
      .def("combine", &combine_results, "call"_a, "results"_a, "out"_a)
      .def(
          "dispatch_on_gpu",
          [](nb::handle_t<ExpertParallel> self, nb::handle hidden, nb::handle hidden_scales,
             nb::handle row_scale, nb::handle ids, nb::handle weights) {
            return dispatch_on_gpu(self, hidden, hidden_scales, row_scale, ids, weights);
          },
          "hidden"_a, "hidden_scales"_a.none(), "row_scale"_a.none(), "ids"_a, "weights"_a)
      .def("results_on_gpu",
           [](nb::handle_t<ExpertParallel> self) {
             return group_tensor(self, nb::cast<ExpertParallel&>(self).results());
           })
      .def("combine_on_gpu", &combine_on_gpu, "call"_a, "out"_a)
      .def("run", &run_experts, "layer"_a, "hidden"_a, "hidden_scales"_a.none(),
           "row_scale"_a.none(), "ids"_a, "weights"_a, "out"_a, "workspace"_a)
      .def("check_error", &ExpertParallel::check_error)
      .def("give_up", [](ExpertParallel& self) { self.give_up(current_stream(self.device())); })
      .def("destroy", &ExpertParallel::destroy, nb::call_guard<nb::gil_scoped_release>());

  module.def(
      "place_experts",
      [](const std::vector<double>& loads, int ranks, int32_t redundant) {
        const nb::gil_scoped_release unlocked;
        return place_experts(loads, ranks, redundant);
      },
      "loads"_a, "ranks"_a, "redundant"_a = 0,
      "The expert at each of E + redundant places, so that ranks have even loads.\n\n"
      "loads: how many tokens chose each expert. redundant: copies of experts with much load.\n"
      "Rank r has the places that ExpertParallel(places=...).shard says.");
  module.def(
      "load_places", [](const std::string& path) { return ExpertPlacement::load(path).layers; },
      "path"_a, "The places of each layer by name, from a file of `narrowfloat moe place`.");
  module.def(
      "explain_expert_parallel",
      [](int ranks, const GroupOptions& given, bool is_one_host, bool has_all_to_all) {
        return explain_expert_parallel({.ranks = ranks,
                                        .config = given.config,
                                        .device = given.options.device,
                                        .transport = given.options.transport,
                                        .is_one_host = is_one_host,
                                        .has_all_to_all = has_all_to_all});
      },
      "ranks"_a, "options"_a, "is_one_host"_a, "has_all_to_all"_a);
}

}  // namespace narrowfloat::python

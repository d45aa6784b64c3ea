// Single safetensors files: the functions that QuantizedTensor.save() and load() need.
#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "narrowfloat/error.h"
#include "narrowfloat/safetensors.h"
#include "python/src/arrays.h"
#include "python/src/bindings.h"

namespace narrowfloat::python {
namespace {

using nb::literals::operator""_a;
using Metadata = std::map<std::string, std::string>;

[[noreturn]] void throw_invalid(const std::string& message) {
  throw Error(ErrorKind::kInvalidArgument, message);
}

std::span<std::byte> dense_bytes(const std::string& argument, const Array& array) {
  if (!is_dense(array.view)) throw_invalid(argument + ": expected a C-contiguous array");
  if (array.view.device.type != DeviceType::kCpu) {
    throw_invalid(argument + ": expected an array on the CPU, got one on " +
                  to_string(array.view.device) + "; copy it there");
  }
  const int64_t size_bits = array.view.num_elements() * bits(array.view.dtype);
  return {static_cast<std::byte*>(array.view.data), static_cast<size_t>(size_bits) / 8};
}

// A tensor of a file to be: name, element type as safetensors spells it, array.
using NamedArray = std::tuple<std::string, std::string, nb::object>;

void write_file(const std::string& path, const std::vector<NamedArray>& tensors,
                const Metadata& metadata) {
  std::vector<TensorSpec> specs;
  std::vector<Array> arrays;
  for (const auto& [name, dtype_name, object] : tensors) {
    const std::optional<DType> dtype = parse_dtype(dtype_name);
    if (!dtype) throw_invalid(name + ": unknown element type " + dtype_name);
    const Array& array = arrays.emplace_back(input_array(name, object));
    const auto& shape = array.view.shape;
    specs.push_back(
        {.name = name, .dtype = *dtype, .shape = {shape.begin(), shape.begin() + array.view.rank}});
    if (bits(*dtype) != bits(array.view.dtype)) throw_invalid(name + ": not of " + dtype_name);
  }
  const nb::gil_scoped_release unlocked;
  SafetensorsWriter writer(path, specs, metadata);
  for (size_t i = 0; i < specs.size(); ++i) {
    writer.write(specs[i].name, 0, dense_bytes(specs[i].name, arrays[i]));
  }
  writer.commit();
}

SafetensorsReader open_file(const std::string& path) {
  const nb::gil_scoped_release unlocked;
  return SafetensorsReader(path);
}

// Element type, shape.
using StoredTensor = std::tuple<std::string, std::vector<int64_t>>;

nb::typed<nb::dict, nb::str, StoredTensor> listing(const SafetensorsReader& reader) {
  nb::typed<nb::dict, nb::str, StoredTensor> tensors;
  for (const TensorInfo& info : reader.tensors()) {
    tensors[info.name.c_str()] = StoredTensor(name(info.dtype), info.shape);
  }
  return tensors;
}

void read_tensor(const SafetensorsReader& reader, const std::string& name, nb::handle output) {
  const TensorInfo* info = reader.find(name);
  if (info == nullptr) throw_invalid(reader.path() + ": no tensor " + printable(name));
  const Array array = output_array("out", output);
  const std::span<std::byte> target = dense_bytes("out", array);
  if (target.size() != info->size_bytes) throw_invalid("out: not of the size of the tensor");
  const nb::gil_scoped_release unlocked;
  reader.read(*info, 0, target);
}

}  // namespace

void bind_files(nb::module_& module) {
  module.def("write_safetensors", &write_file, "path"_a, "tensors"_a, "metadata"_a);
  nb::class_<SafetensorsReader>(module, "SafetensorsReader")
      .def_static("open", &open_file, "path"_a)
      .def("tensors", &listing)
      .def("metadata", &SafetensorsReader::metadata)
      .def("read", &read_tensor, "name"_a, "out"_a);
}

}  // namespace narrowfloat::python

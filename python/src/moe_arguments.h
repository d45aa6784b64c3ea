// Arguments of the Mixture-of-Experts functions: structures of the library with the arrays that
// they point into.
#pragma once

#include <string_view>
#include <vector>

#include "narrowfloat/moe.h"
#include "python/src/arrays.h"

namespace narrowfloat::python {

struct PythonMoeConfig {
  MoeConfig config;
  MoeReferenceOptions reference;
  std::vector<Array> arrays;

  // Whether an option asks for a reference layer. Throws kUnsupported where one does on a GPU.
  [[nodiscard]] bool is_reference(Device device) const;
};

struct PythonMoeWeights {
  MoeMode mode = MoeMode::kBf16;
  MoeWeights weights;
  std::vector<Array> arrays;  // The first is w1's values, whose device and stream count.
};

// A number, or a float32 array with one for each expert; the array is added to `arrays`.
PerExpert per_expert(std::string_view argument, nb::handle value, std::vector<Array>& arrays);

// The members of a C++ structure that a Python dictionary may name.
template <typename Struct>
struct NamedView {
  std::string_view name;
  TensorView Struct::*view;
};

[[noreturn]] void throw_unknown_member(std::string_view name);

// Fills views from the entries of `source` that are not None. Throws kInvalidArgument for names
// that the structure lacks. `outputs`: the arrays are written to.
template <typename Struct, size_t kCount>
void set_views(const NamedArrays& source, const NamedView<Struct> (&members)[kCount],
               Struct& target, std::vector<Array>& arrays, bool outputs) {
  for (const auto& [key, value] : source) {
    if (value.is_none()) continue;
    const auto* name = PyUnicode_AsUTF8AndSize(
        key.ptr(), nullptr);  // PyUnicode_AsUTF8AndSize() is part of the stable ABI.
    const NamedView<Struct>* found = nullptr;
    for (const NamedView<Struct>& member : members) {
      if (name != nullptr && member.name == name) found = &member;
    }
    if (found == nullptr) throw_unknown_member(name == nullptr ? "?" : name);
    arrays.push_back(outputs ? output_array(name, value, DType::kU8)
                             : input_array(name, value, DType::kU8));
    target.*(found->view) = arrays.back().view;
  }
}

// The routing of a dictionary with logits, bias, packed, ids, weights.
Routing routing_of(const NamedArrays& source, std::vector<Array>& arrays);

// int64 [2] on the device: the contents of a DeviceErrors. None gives null.
DeviceErrors* device_errors(nb::handle array, std::vector<Array>& arrays);

// The type of one-byte activation rows of a mode that arrive as uint8.
DType type_of_bytes(MoeMode mode);

// Weights [experts, rows, cols] with the scales of the mode's format in `layout`; the arrays are
// added to `arrays`. which: "w1", as messages name them. Throws kInvalidArgument for other axes and
// for scales of another type, or that are strided.
WeightView weight_view(std::string_view which, MoeMode mode, nb::handle values, nb::handle scales,
                       std::string_view layout, std::vector<Array>& arrays);

inline constexpr NamedView<Permutation> kPermutationMembers[] = {
    {"slot_to_row", &Permutation::slot_to_row},
    {"row_to_token", &Permutation::row_to_token},
    {"row_to_slot", &Permutation::row_to_slot},
    {"num_rows", &Permutation::num_rows},
    {"tile_to_expert", &Permutation::tile_to_expert},
    {"tile_row_end", &Permutation::tile_row_end},
    {"num_tiles", &Permutation::num_tiles}};

}  // namespace narrowfloat::python

// What the Python bindings of products and of programs share.
#pragma once

#include <string>
#include <vector>

#include "arrays.h"
#include "linear/linear.h"

namespace pm {

const char* act_kind_name(ActKind kind);
// Whether one may be multiplied in the other's place: kind, shape, and the form of the rows it takes.
bool alike(const PackedLinear& a, const PackedLinear& b);
// silu or gelu_tanh.
Gate gate_named(const std::string& name);
// A block of hadamard_row() that fits rows of so many columns.
void check_hadamard(int64_t block, int64_t columns);
// The matrices of a list, each also added to `kept`: the list may change afterwards.
std::vector<const PackedLinear*> packed_list(nanobind::sequence list, std::vector<nanobind::object>& kept);

}  // namespace pm

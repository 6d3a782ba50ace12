#include "arrays.h"

#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace pm {
namespace {

std::string type_name(nb::dlpack::dtype type) {
  std::string kind = "type " + std::to_string(type.code) + " of ";  // of DLPack
  switch (static_cast<nb::dlpack::dtype_code>(type.code)) {
    case nb::dlpack::dtype_code::Bool: return "bool";
    case nb::dlpack::dtype_code::Int: kind = "int"; break;
    case nb::dlpack::dtype_code::UInt: kind = "uint"; break;
    case nb::dlpack::dtype_code::Float: kind = "float"; break;
    case nb::dlpack::dtype_code::Bfloat: kind = "bfloat"; break;
    case nb::dlpack::dtype_code::Complex: kind = "complex"; break;
    default: kind += "bits ";
  }
  return kind + std::to_string(type.bits);
}

template <class Value>
std::string listed(size_t n, Value value) {
  std::string text = "[";
  for (size_t i = 0; i < n; ++i) text += (i ? ", " : "") + value(i);
  return text + "]";
}

std::string description(nb::handle got) {
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast(got, array, false)) {
    return nb::cast<std::string>(nb::str(got.type().attr("__name__"))) + " that cannot be read as an array";
  }
  const auto number = [](int64_t value) { return std::to_string(value); };
  std::string text = type_name(array.dtype()) + " " + listed(array.ndim(), [&](size_t i) { return number(dim(array, i)); });
  text += " of strides " + listed(array.ndim(), [&](size_t i) { return number(array.stride(i)); });
  if (array.device_type() != nb::device::cpu::value) text += " on another device";
  return text;
}

}  // namespace

void refuse_array(nb::handle got, const Wanted& wanted) {
  const std::string type = wanted.type.bits ? type_name(wanted.type) + " " : "";
  const std::string shape = listed(static_cast<size_t>(wanted.ndim), [](size_t) { return std::string("*"); });
  refuse("an argument is ", description(got), ", but must be ", type, shape, wanted.contiguous ? ", contiguous" : "",
         wanted.writable ? ", writable" : "", ", on the CPU; convert it first, as nothing is converted or copied here");
}

}  // namespace pm

// Arrays as arguments from Python, and how what does not fit is refused.
//
// An Array is taken as it is: nanobind would convert one of another type or layout into a copy, and what a kernel writes
// to a copy is lost, as are the high bits of what is narrowed. It is a ValueError instead, raised when the argument is
// handed to the function: not from within std::optional or std::vector, whose conversions must not throw. So an array that
// may be left out is an Array whose argument takes None, to be asked is_valid(); and a list of arrays is array_list().
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pm {

// The parts one after another, as a ValueError.
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

inline void check(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

template <class... Args>
struct Array : nanobind::ndarray<Args..., nanobind::device::cpu> {
  using Plain = nanobind::ndarray<Args..., nanobind::device::cpu>;
  Array() = default;
  explicit Array(Plain plain) : Plain(std::move(plain)) {}
};

template <class T>
using Vec = Array<T, nanobind::ndim<1>, nanobind::c_contig>;
template <class T>
using Mat = Array<T, nanobind::ndim<2>, nanobind::c_contig>;
template <class T>
using Cube = Array<T, nanobind::ndim<3>, nanobind::c_contig>;
// Rows may lie apart, or be those of a wider array; row_stride() says how far.
template <class T>
using Rows2d = Array<T, nanobind::ndim<2>>;

// What keeps an array's memory alive: the object that it came from, or for a tensor another one over the same memory, as
// a tensor may be given other memory (`tensor.data = ...`).
template <class... Args>
nanobind::object owner_of(const Array<Args...>& array) {
  nanobind::object owner = nanobind::cast(static_cast<const typename Array<Args...>::Plain&>(array));
  return nanobind::hasattr(owner, "detach") ? owner.attr("detach")() : owner;
}

template <class A>
int64_t dim(const A& a, size_t i) { return static_cast<int64_t>(a.shape(i)); }

// Values from row to row. Within a row they must be adjacent, and rows that are written must not overlap.
template <class A>
int64_t row_stride(const A& a, const char* name) {
  const int64_t rows = dim(a, 0), columns = dim(a, 1);
  if (columns > 1 && a.stride(1) != 1) {
    refuse(name, " must be contiguous along its last axis, whose values lie ", a.stride(1), " apart; pass a contiguous copy");
  }
  if (rows < 2) return columns;
  if (!A::ReadOnly && a.stride(0) < columns) {
    refuse("the rows of ", name, " overlap or run backwards: they begin ", a.stride(0), " values apart and are ", columns,
           " long; pass a contiguous array");
  }
  return a.stride(0);
}

template <class A>
void check_shape(const A& a, int64_t rows, int64_t columns, const char* name) {
  if (dim(a, 0) == rows && dim(a, 1) == columns) return;
  refuse(name, " is [", dim(a, 0), ", ", dim(a, 1), "], expected [", rows, ", ", columns, "]");
}

template <class A>
void check_length(const A& a, int64_t length, const char* name) {
  if (dim(a, 0) != length) refuse(name, " has ", dim(a, 0), " entries, expected ", length);
}

// What an argument must be.
struct Wanted {
  nanobind::dlpack::dtype type;  // 0 bits: any
  int ndim;
  bool contiguous, writable;
};
[[noreturn]] void refuse_array(nanobind::handle got, const Wanted& wanted);

// Each array of a list (or another sequence).
template <class A>
std::vector<A> array_list(nanobind::sequence list) {
  std::vector<A> arrays;
  for (nanobind::handle item : list) arrays.push_back(nanobind::cast<A>(item));
  return arrays;
}

}  // namespace pm

namespace nanobind::detail {

template <class... Args>
struct type_caster<pm::Array<Args...>> {
  using Value = pm::Array<Args...>;
  using Plain = typename Value::Plain;
  using Config = typename Plain::Config;
  static constexpr auto Name = make_caster<Plain>::Name;
  template <class T>
  using Cast = movable_cast_t<T>;
  template <class T>
  static constexpr bool can_cast() { return true; }

  bool from_python(handle src, uint32_t flags, cleanup_list* cleanup) noexcept {
    make_caster<Plain> caster;
    fits = caster.from_python(src, flags & ~static_cast<uint32_t>(cast_flags::convert), cleanup);
    value = Value(std::move(caster.value));
    source = src;
    return true;
  }

  explicit operator Value*() { return &checked(); }
  explicit operator Value&() { return checked(); }
  explicit operator Value&&() { return std::move(checked()); }

 private:
  Value& checked() {
    if (!fits) {
      pm::refuse_array(source, {nanobind::dtype<typename Config::Scalar>(), static_cast<int>(Config::N),
                                Config::Order::value == 'C', !Plain::ReadOnly});
    }
    return value;
  }

  Value value;
  handle source;
  bool fits = false;
};

}  // namespace nanobind::detail

// pagemill._native: packed weights and matrix products. Arguments are torch CPU tensors or numpy arrays; shapes and
// errors are documented in src/pagemill/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "linear/linear.h"
#include "linear/pack.h"
#include "linear/table.h"

namespace nb = nanobind;

namespace pm {
namespace {

using AnyMatrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>;
using FloatMatrix = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using FloatOut = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using FloatVector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowIndices = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument(what); }

template <class Array>
int64_t dim(const Array& a, size_t i) { return static_cast<int64_t>(a.shape(i)); }

// Rows may lie apart; within a row the values are adjacent.
template <class Array>
int64_t row_stride(const Array& a, const char* name) {
  if (a.shape(1) > 1 && a.stride(1) != 1) fail(std::string(name) + " must be contiguous along its last axis");
  return a.stride(0);
}

template <class Array>
void check_shape(const Array& a, int64_t rows, int64_t columns, const char* name) {
  if (dim(a, 0) == rows && dim(a, 1) == columns) return;
  fail(std::string(name) + " is [" + std::to_string(dim(a, 0)) + ", " + std::to_string(dim(a, 1)) + "], expected [" +
       std::to_string(rows) + ", " + std::to_string(columns) + "]");
}

FloatRows float_rows(const AnyMatrix& a, int64_t k) {
  check_shape(a, dim(a, 0), k, "rows");
  const auto type = a.dtype();
  const auto bfloat = static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat);
  if (type == nb::dtype<float>()) return {a.data(), SourceType::f32, row_stride(a, "rows")};
  if (type.bits == 16 && type.code == bfloat) return {a.data(), SourceType::bf16, row_stride(a, "rows")};
  if (type.bits == 16 && type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)) {
    return {a.data(), SourceType::f16, row_stride(a, "rows")};
  }
  fail("rows must be float32, float16 or bfloat16");
}

WeightKind kind_by_name(const std::string& name) {
  if (name == "f32") return WeightKind::f32;
  if (name == "bf16") return WeightKind::bf16;
  if (name == "int8") return WeightKind::int8;
  if (name == "group4") return WeightKind::group4;
  if (name == "group8") return WeightKind::group8;
  fail("no weight kind '" + name + "'; there are f32, bf16, int8, group4, group8");
}

const char* kind_name(WeightKind kind) {
  constexpr const char* kNames[] = {"f32", "bf16", "int8", "group4", "group8"};
  return kNames[static_cast<int>(kind)];
}

Gate gate_by_name(const std::string& name) {
  if (name == "silu") return Gate::silu;
  if (name == "gelu_tanh") return Gate::gelu_tanh;
  fail("no gate '" + name + "'; there are silu, gelu_tanh");
}

PackedLinear create(const std::string& kind, int64_t rows, int64_t k, bool gated, bool bias, int group, bool has_min) {
  return new_packed({kind_by_name(kind), rows, k, gated, bias, group, has_min});
}

void write_floats(PackedLinear& w, int64_t first, const AnyMatrix& rows) {
  const FloatRows source = float_rows(rows, w.k);
  nb::gil_scoped_release release;
  if (w.kind == WeightKind::int8) {
    write_rounded_int8_rows(w, first, dim(rows, 0), source);
  } else {
    write_float_rows(w, first, dim(rows, 0), source);
  }
}

void write_int8(PackedLinear& w, int64_t first, nb::ndarray<const int8_t, nb::ndim<2>, nb::device::cpu> q,
                const FloatVector& scale) {
  check_shape(q, dim(q, 0), w.k, "q");
  if (scale.shape(0) != q.shape(0)) fail("one scale per row of q is needed");
  const int64_t ld = row_stride(q, "q");
  nb::gil_scoped_release release;
  write_int8_rows(w, first, dim(q, 0), q.data(), ld, scale.data());
}

using GroupFloats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void write_groups(PackedLinear& w, int64_t first, nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu> q,
                  const GroupFloats& scale, std::optional<GroupFloats> min, int zero) {
  if (w.group == 0) fail("this packed matrix does not take grouped rows");
  const int64_t groups = (w.k + w.group - 1) / w.group;
  check_shape(q, dim(q, 0), w.k, "q");
  check_shape(scale, dim(q, 0), groups, "scale");
  if (min) check_shape(*min, dim(q, 0), groups, "min");
  const int64_t ld = row_stride(q, "q");
  nb::gil_scoped_release release;
  write_group_rows(w, first, dim(q, 0), q.data(), ld, scale.data(), min ? min->data() : nullptr, zero);
}

void write_bias_values(PackedLinear& w, int64_t first, const FloatVector& bias) {
  write_bias(w, first, static_cast<int64_t>(bias.shape(0)), bias.data());
}

void check_indices(const RowIndices& rows, int64_t limit) {
  for (size_t i = 0; i < rows.shape(0); ++i) {
    if (rows.data()[i] < 0 || rows.data()[i] >= limit) fail("rows holds an index outside 0 .. " + std::to_string(limit));
  }
}

void unpack_into(const PackedLinear& w, nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> out,
                 std::optional<RowIndices> rows) {
  const int64_t stored = w.gated ? 2 * w.n : w.n;
  const int64_t count = rows ? static_cast<int64_t>(rows->shape(0)) : stored;
  check_shape(out, count, w.k, "out");
  if (rows) check_indices(*rows, stored);
  nb::gil_scoped_release release;
  unpack(w, rows ? rows->data() : nullptr, count, out.data());
}

// Scratch of the Python entry points, which are called from one thread at a time per thread: kept between calls.
Buffer& scratch(size_t bytes) {
  thread_local Buffer buffer;
  if (buffer.size() < bytes) buffer = Buffer(bytes);
  return buffer;
}

void linear(const FloatMatrix& x, const PackedLinear& w, const FloatOut& out, std::optional<RowIndices> rows,
            bool accumulate, const std::string& gate) {
  const int64_t count = rows ? static_cast<int64_t>(rows->shape(0)) : dim(x, 0);
  check_shape(x, dim(x, 0), w.k, "x");
  check_shape(out, count, w.n, "out");
  if (rows) check_indices(*rows, dim(x, 0));
  const int64_t ldx = row_stride(x, "x"), ldo = row_stride(out, "out");
  const Gate chosen = gate_by_name(gate);
  nb::gil_scoped_release release;
  const ActKind kind = activation_kind(w);
  Buffer& memory = scratch(static_cast<size_t>(activation_bytes(kind, count, w.k)));
  const Activation act = activation_at(memory.as<>(), kind, count, w.k);
  parallel([&](Team& team) {
    prepare_rows(team, x.data(), ldx, rows ? rows->data() : nullptr, act);
    team.barrier();
    linear_run(team, {act, &w, out.data(), ldo, accumulate, chosen});
  });
}

// Seconds that linear_run takes for one of `copies`, inside one parallel region; for the benchmarks. Each of the copies
// is timed by itself `repeats` times, one after the other, so that its weights come from where they would in a model; the
// result is the mean over the copies of each one's quickest time, which a busy machine disturbs least.
double time_linear(const nb::list& copies, int64_t rows, int64_t repeats, bool prepare) {
  std::vector<const PackedLinear*> weights;
  for (nb::handle h : copies) weights.push_back(&nb::cast<const PackedLinear&>(h));
  if (weights.empty()) fail("no weights");
  const PackedLinear& w = *weights[0];
  nb::gil_scoped_release release;
  const ActKind kind = activation_kind(w);
  Buffer memory(static_cast<size_t>(activation_bytes(kind, rows, w.k)));
  const Activation act = activation_at(memory.as<>(), kind, rows, w.k);
  std::vector<float> x(static_cast<size_t>(rows * w.k)), out(static_cast<size_t>(rows * w.n));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7) - 3;
  std::vector<double> best(weights.size(), 1e30);
  parallel([&](Team& team) {
    prepare_rows(team, x.data(), w.k, nullptr, act);
    team.barrier();
    for (int64_t i = 0; i < repeats; ++i) {
      for (size_t c = 0; c < weights.size(); ++c) {
        // Before the barrier: another rank may be through with all the work before this one has its core back.
        const auto begin = std::chrono::steady_clock::now();
        team.barrier();
        if (prepare) {
          prepare_rows(team, x.data(), w.k, nullptr, act);
          team.barrier();
        }
        linear_run(team, {act, weights[c], out.data(), w.n, false, Gate::silu});
        team.barrier();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        if (team.rank() == 0 && took.count() < best[c]) best[c] = took.count();
      }
    }
  });
  double total = 0;
  for (double seconds : best) total += seconds;
  return total / static_cast<double>(weights.size());
}

using Int8Out = nb::ndarray<int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatContig = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntContig = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void quantize_token(const FloatMatrix& x, Int8Out q, FloatContig scale, IntContig sum) {
  const int64_t rows = dim(x, 0), k = dim(x, 1), ld = row_stride(x, "x");
  check_shape(q, rows, k, "q");
  check_shape(scale, rows, 1, "scale");
  check_shape(sum, rows, 1, "sum");
  nb::gil_scoped_release release;
  Buffer memory(static_cast<size_t>(activation_row_bytes(ActKind::i8_token, k)));
  for (int64_t i = 0; i < rows; ++i) {
    pick_linear().prepare_row(ActKind::i8_token, x.data() + i * ld, k, memory.as<>());
    const auto* head = memory.as<TokenHead>();
    scale.data()[i] = head->scale;
    sum.data()[i] = head->sum128 / 128;
    std::memcpy(q.data() + i * k, memory.as<>() + kTokenHead, static_cast<size_t>(k));
  }
}

void quantize_group(const FloatMatrix& x, Int8Out q, FloatContig scale, IntContig sum) {
  const int64_t rows = dim(x, 0), k = dim(x, 1), ld = row_stride(x, "x"), groups = (k + kActGroup - 1) / kActGroup;
  check_shape(q, rows, k, "q");
  check_shape(scale, rows, groups, "scale");
  check_shape(sum, rows, groups, "sum");
  nb::gil_scoped_release release;
  Buffer memory(static_cast<size_t>(activation_row_bytes(ActKind::i8_group, k)));
  for (int64_t i = 0; i < rows; ++i) {
    pick_linear().prepare_row(ActKind::i8_group, x.data() + i * ld, k, memory.as<>());
    for (int64_t g = 0; g < groups; ++g) {
      const GroupRecord& record = memory.as<GroupRecord>()[g];
      scale.data()[i * groups + g] = record.scale;
      sum.data()[i * groups + g] = record.offset / -8;
      const int64_t values = k - g * kActGroup < kActGroup ? k - g * kActGroup : kActGroup;
      std::memcpy(q.data() + i * k + g * kActGroup, record.q, static_cast<size_t>(values));
    }
  }
}

void hadamard(const FloatOut& x, int64_t block) {
  const int64_t rows = dim(x, 0), k = dim(x, 1), ld = row_stride(x, "x");
  if (block < 1 || (block & (block - 1)) != 0 || k % block != 0) {
    fail("block " + std::to_string(block) + " must be a power of two that divides " + std::to_string(k));
  }
  nb::gil_scoped_release release;
  parallel([&](Team& team) { hadamard_rows(team, x.data(), rows, ld, k, block); });
}

}  // namespace

void register_linear(nb::module_& m) {
  nb::class_<PackedLinear>(m, "PackedLinear")
      .def("__init__", [](PackedLinear* self, const std::string& kind, int64_t rows, int64_t k, bool gated, bool bias,
                          int group, bool has_min) {
             new (self) PackedLinear(create(kind, rows, k, gated, bias, group, has_min));
           }, nb::arg("kind"), nb::arg("rows"), nb::arg("k"), nb::kw_only(), nb::arg("gated") = false,
           nb::arg("bias") = false, nb::arg("group") = 0, nb::arg("has_min") = false)
      .def("write_floats", &write_floats, nb::arg("first"), nb::arg("rows"))
      .def("write_int8", &write_int8, nb::arg("first"), nb::arg("q"), nb::arg("scale"))
      .def("write_groups", &write_groups, nb::arg("first"), nb::arg("q"), nb::arg("scale"),
           nb::arg("minimum").none() = nb::none(), nb::arg("zero") = 8)
      .def("write_bias", &write_bias_values, nb::arg("first"), nb::arg("bias"))
      .def("unpack", &unpack_into, nb::arg("out"), nb::arg("rows").none() = nb::none())
      .def_prop_ro("kind", [](const PackedLinear& w) { return kind_name(w.kind); })
      .def_ro("n", &PackedLinear::n)
      .def_ro("k", &PackedLinear::k)
      .def_ro("gated", &PackedLinear::gated)
      .def_ro("group", &PackedLinear::group)
      .def_ro("has_min", &PackedLinear::has_min)
      .def_prop_ro("activation_kind", [](const PackedLinear& w) { return static_cast<int>(activation_kind(w)); })
      .def_prop_ro("nbytes", &PackedLinear::bytes);
  m.def("linear", &linear, nb::arg("x"), nb::arg("w"), nb::arg("out"), nb::kw_only(),
        nb::arg("rows").none() = nb::none(), nb::arg("accumulate") = false, nb::arg("gate") = "silu");
  m.def("time_linear", &time_linear, nb::arg("copies"), nb::arg("rows"), nb::arg("repeats"), nb::arg("prepare") = false);
  m.def("quantize_token", &quantize_token, nb::arg("x"), nb::arg("q"), nb::arg("scale"), nb::arg("total"));
  m.def("quantize_group", &quantize_group, nb::arg("x"), nb::arg("q"), nb::arg("scale"), nb::arg("total"));
  m.def("hadamard", &hadamard, nb::arg("x"), nb::arg("block"));
}

}  // namespace pm

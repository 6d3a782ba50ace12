// pagemill._native: packed weights and matrix products. Arguments are torch CPU tensors or numpy arrays; shapes and
// errors are documented in src/pagemill/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <string>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "linear/bindings_shared.h"
#include "linear/linear.h"
#include "linear/pack.h"
#include "linear/table.h"

namespace nb = nanobind;

namespace pm {

Gate gate_named(const std::string& name) {
  if (name == "silu") return Gate::silu;
  if (name == "gelu_tanh") return Gate::gelu_tanh;
  refuse("no gate '", name, "'; there are silu, gelu_tanh");
}

const char* act_kind_name(ActKind kind) {
  constexpr const char* kNames[] = {"f32", "bf16", "i8_token", "i8_group", "i8_token_pairs", "i8_group_pairs"};
  return kNames[static_cast<int>(kind)];
}

bool alike(const PackedLinear& a, const PackedLinear& b) {
  return a.kind == b.kind && activation_kind(a) == activation_kind(b) && a.n == b.n && a.k == b.k && a.gated == b.gated;
}

void check_hadamard(int64_t block, int64_t columns) {
  if (block < 1 || (block & (block - 1)) != 0 || columns % block != 0) {
    refuse("block ", block, " must be a power of two that divides ", columns);
  }
}

std::vector<const PackedLinear*> packed_list(nb::sequence list, std::vector<nb::object>& kept) {
  std::vector<const PackedLinear*> matrices;
  for (nb::handle item : list) {
    const PackedLinear* matrix = nullptr;
    if (!nb::try_cast(item, matrix, false) || matrix == nullptr) {
      refuse("entry ", matrices.size(), " of a list of matrices is no PackedLinear");
    }
    matrices.push_back(matrix);
    kept.push_back(nb::borrow(item));
  }
  return matrices;
}

namespace {

using AnyMatrix = Rows2d<nb::ro>;
using FloatMatrix = Rows2d<const float>;
using RowIndices = Vec<const int32_t>;

FloatRows float_rows(const AnyMatrix& a, int64_t k) {
  check_shape(a, dim(a, 0), k, "rows");
  const auto type = a.dtype();
  const auto bfloat = static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat);
  if (type == nb::dtype<float>()) return {a.data(), SourceType::f32, row_stride(a, "rows")};
  if (type.bits == 16 && type.code == bfloat) return {a.data(), SourceType::bf16, row_stride(a, "rows")};
  if (type.bits == 16 && type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)) {
    return {a.data(), SourceType::f16, row_stride(a, "rows")};
  }
  refuse("rows must be float32, float16 or bfloat16; they are of ", static_cast<int>(type.bits), " bits: convert them first");
}

WeightKind kind_by_name(const std::string& name) {
  if (name == "f32") return WeightKind::f32;
  if (name == "bf16") return WeightKind::bf16;
  if (name == "int8") return WeightKind::int8;
  if (name == "group4") return WeightKind::group4;
  if (name == "group8") return WeightKind::group8;
  refuse("no weight kind '", name, "'; there are f32, bf16, int8, group4, group8");
}

const char* kind_name(WeightKind kind) {
  constexpr const char* kNames[] = {"f32", "bf16", "int8", "group4", "group8"};
  return kNames[static_cast<int>(kind)];
}

PackedLinear create(const std::string& kind, int64_t rows, int64_t k, bool gated, bool bias, int group, bool has_min,
                    int bits) {
  return new_packed({kind_by_name(kind), rows, k, gated, bias, group, has_min, bits});
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

void write_int8(PackedLinear& w, int64_t first, Rows2d<const int8_t> q,
                const Vec<const float>& scale) {
  check_shape(q, dim(q, 0), w.k, "q");
  check_length(scale, dim(q, 0), "scale");
  const int64_t ld = row_stride(q, "q");
  nb::gil_scoped_release release;
  write_int8_rows(w, first, dim(q, 0), q.data(), ld, scale.data());
}

void write_groups(PackedLinear& w, int64_t first, Rows2d<const uint8_t> q,
                  const Mat<const float>& scale, const Mat<const float>& min, int zero) {
  if (w.group == 0) refuse("this packed matrix of ", kind_name(w.kind), " does not take grouped rows; group4 and group8 do");
  const int64_t groups = (w.k + w.group - 1) / w.group;
  check_shape(q, dim(q, 0), w.k, "q");
  check_shape(scale, dim(q, 0), groups, "scale");
  if (min.is_valid()) check_shape(min, dim(q, 0), groups, "min");
  const int64_t ld = row_stride(q, "q");
  nb::gil_scoped_release release;
  write_group_rows(w, first, dim(q, 0), q.data(), ld, scale.data(), min.is_valid() ? min.data() : nullptr, zero);
}

void write_bias_values(PackedLinear& w, int64_t first, const Vec<const float>& bias) {
  write_bias(w, first, static_cast<int64_t>(bias.shape(0)), bias.data());
}

// How many rows are meant: those listed, or all. None may lie outside.
int64_t count_rows(const RowIndices& rows, int64_t all) {
  if (!rows.is_valid()) return all;
  for (size_t i = 0; i < rows.shape(0); ++i) {
    const int32_t row = rows.data()[i];
    if (row < 0 || row >= all) refuse("rows holds the index ", row, "; it must be from 0 to ", all - 1);
  }
  return dim(rows, 0);
}

const int32_t* data_or_null(const RowIndices& rows) { return rows.is_valid() ? rows.data() : nullptr; }

void unpack_into(const PackedLinear& w, Mat<float> out, const RowIndices& rows) {
  const int64_t count = count_rows(rows, w.gated ? 2 * w.n : w.n);
  check_shape(out, count, w.k, "out");
  nb::gil_scoped_release release;
  unpack(w, data_or_null(rows), count, out.data());
}

// Scratch of the Python entry points, which are called from one thread at a time per thread: kept between calls.
Buffer& scratch(size_t bytes) {
  thread_local Buffer buffer;
  if (buffer.size() < bytes) buffer = Buffer(bytes);
  return buffer;
}

void linear(const FloatMatrix& x, const PackedLinear& w, const Rows2d<float>& out, const RowIndices& rows, bool accumulate,
            const std::string& gate) {
  const int64_t count = count_rows(rows, dim(x, 0));
  check_shape(x, dim(x, 0), w.k, "x");
  check_shape(out, count, w.n, "out");
  const int64_t ldx = row_stride(x, "x"), ldo = row_stride(out, "out");
  const Gate chosen = gate_named(gate);
  nb::gil_scoped_release release;
  const ActKind kind = activation_kind(w);
  Buffer& memory = scratch(static_cast<size_t>(activation_bytes(kind, count, w.k)));
  const Activation act = activation_at(memory.as<>(), kind, count, w.k);
  parallel([&](Team& team) {
    prepare_rows(team, x.data(), ldx, data_or_null(rows), act);
    team.barrier();
    linear_run(team, {act, &w, out.data(), ldo, accumulate, chosen});
  });
}

// Seconds that linear_run takes for one of `copies`, inside one parallel region; for the benchmarks. Each of the copies
// is timed by itself `repeats` times, one after the other, so that its weights come from where they would in a model; the
// result is the mean over the copies of each one's quickest time, which a busy machine disturbs least.
double time_linear(nb::sequence copies, int64_t rows, int64_t repeats, bool prepare) {
  std::vector<nb::object> kept;
  const std::vector<const PackedLinear*> weights = packed_list(copies, kept);
  if (weights.empty()) refuse("copies is empty; one matrix is the least");
  const PackedLinear& w = *weights[0];
  for (const PackedLinear* other : weights) {
    check(alike(*other, w), "copies differ in kind or shape; time one shape at a time");
  }
  if (rows < 1 || repeats < 1) refuse("rows is ", rows, " and repeats is ", repeats, "; the least is 1");
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

void quantize_token(const FloatMatrix& x, Mat<int8_t> q, Mat<float> scale, Mat<int32_t> sum, bool pairs) {
  const int64_t rows = dim(x, 0), k = dim(x, 1), ld = row_stride(x, "x");
  const ActKind kind = pairs ? ActKind::i8_token_pairs : ActKind::i8_token;
  check_shape(q, rows, k, "q");
  check_shape(scale, rows, 1, "scale");
  check_shape(sum, rows, 1, "sum");
  if (k > kMostTokenK) refuse("x has rows of ", k, " values; int8 takes up to ", kMostTokenK, ", as their sums are int32");
  nb::gil_scoped_release release;
  Buffer memory(static_cast<size_t>(activation_row_bytes(kind, k)));
  for (int64_t i = 0; i < rows; ++i) {
    pick_linear().prepare_row(kind, x.data() + i * ld, k, memory.as<>());
    const auto* head = memory.as<TokenHead>();
    scale.data()[i] = head->scale;
    sum.data()[i] = head->sum128 / 128;
    std::memcpy(q.data() + i * k, memory.as<>() + kTokenHead, static_cast<size_t>(k));
  }
}

void quantize_group(const FloatMatrix& x, Mat<int8_t> q, Mat<float> scale, Mat<int32_t> sum, bool pairs) {
  const int64_t rows = dim(x, 0), k = dim(x, 1), ld = row_stride(x, "x"), groups = (k + kActGroup - 1) / kActGroup;
  const ActKind kind = pairs ? ActKind::i8_group_pairs : ActKind::i8_group;
  check_shape(q, rows, k, "q");
  check_shape(scale, rows, groups, "scale");
  check_shape(sum, rows, groups, "sum");
  nb::gil_scoped_release release;
  Buffer memory(static_cast<size_t>(activation_row_bytes(kind, k)));
  for (int64_t i = 0; i < rows; ++i) {
    pick_linear().prepare_row(kind, x.data() + i * ld, k, memory.as<>());
    for (int64_t g = 0; g < groups; ++g) {
      const GroupRecord& record = memory.as<GroupRecord>()[g];
      scale.data()[i * groups + g] = record.scale;
      sum.data()[i * groups + g] = record.offset / -8;
      const int64_t values = k - g * kActGroup < kActGroup ? k - g * kActGroup : kActGroup;
      std::memcpy(q.data() + i * k + g * kActGroup, record.q, static_cast<size_t>(values));
    }
  }
}

void hadamard(const Rows2d<float>& x, int64_t block) {
  const int64_t rows = dim(x, 0), k = dim(x, 1), ld = row_stride(x, "x");
  check_hadamard(block, k);
  nb::gil_scoped_release release;
  parallel([&](Team& team) { hadamard_rows(team, x.data(), rows, ld, k, block); });
}

}  // namespace

void register_linear(nb::module_& m) {
  nb::class_<PackedLinear>(m, "PackedLinear")
      .def("__init__", [](PackedLinear* self, const std::string& kind, int64_t rows, int64_t k, bool gated, bool bias,
                          int group, bool has_min, int bits) {
             new (self) PackedLinear(create(kind, rows, k, gated, bias, group, has_min, bits));
           }, nb::arg("kind"), nb::arg("rows"), nb::arg("k"), nb::kw_only(), nb::arg("gated") = false,
           nb::arg("bias") = false, nb::arg("group") = 0, nb::arg("has_min") = false,
           nb::arg("bits") = 8)
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
      .def_prop_ro("activation_kind", [](const PackedLinear& w) { return act_kind_name(activation_kind(w)); })
      .def_prop_ro("nbytes", &PackedLinear::bytes);
  m.def("linear", &linear, nb::arg("x"), nb::arg("w"), nb::arg("out"), nb::kw_only(),
        nb::arg("rows").none() = nb::none(), nb::arg("accumulate") = false, nb::arg("gate") = "silu");
  m.def("time_linear", &time_linear, nb::arg("copies"), nb::arg("rows"), nb::arg("repeats"), nb::arg("prepare") = false);
  m.def("quantize_token", &quantize_token, nb::arg("x"), nb::arg("q"), nb::arg("scale"), nb::arg("total"),
        nb::arg("pairs") = false);
  m.def("quantize_group", &quantize_group, nb::arg("x"), nb::arg("q"), nb::arg("scale"), nb::arg("total"),
        nb::arg("pairs") = false);
  m.def("hadamard", &hadamard, nb::arg("x"), nb::arg("block"));
}

}  // namespace pm

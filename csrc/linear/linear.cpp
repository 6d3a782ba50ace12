#include "linear/linear.h"

#include "core/isa.h"
#include "linear/table.h"

namespace pm {

PM_DEFINE_PICK(LinearTable, linear)

int64_t activation_row_bytes(ActKind kind, int64_t k) {
  const auto padded = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  switch (kind) {
    case ActKind::f32: return padded(k * 4);
    case ActKind::bf16: return padded(k * 2);
    case ActKind::i8_token:
    case ActKind::i8_token_pairs: return kTokenHead + padded(k);
    case ActKind::i8_group:
    case ActKind::i8_group_pairs: return padded((k + kActGroup - 1) / kActGroup * static_cast<int64_t>(sizeof(GroupRecord)));
  }
  return 0;
}

ActKind activation_kind(const PackedLinear& w) {
  // The products of two neighbours are added in int16, which any two with weights of 7 unsigned bits fit: 2 * 127 * 127.
  const bool pairs = current_isa() == Isa::avx2 && w.bits == 8;
  switch (w.kind) {
    case WeightKind::f32: return ActKind::f32;
    case WeightKind::bf16: return current_isa() == Isa::avx512bf16 ? ActKind::bf16 : ActKind::f32;
    case WeightKind::int8: return pairs ? ActKind::i8_token_pairs : ActKind::i8_token;
    case WeightKind::group4:
    case WeightKind::group8: return pairs ? ActKind::i8_group_pairs : ActKind::i8_group;
  }
  return ActKind::f32;
}

void prepare_rows(Team& team, const float* src, int64_t ld, const int32_t* indices, const Activation& x) {
  const auto prepare = pick_linear().prepare_row;
  team.for_each(x.rows, [&](int64_t i) {
    prepare(x.kind, src + (indices != nullptr ? indices[i] : i) * ld, x.k, x.row(i));
  });
}

void hadamard_rows(Team& team, float* x, int64_t rows, int64_t ld, int64_t k, int64_t block) {
  const auto hadamard = pick_linear().hadamard_row;
  team.for_each(rows, [&](int64_t i) { hadamard(x + i * ld, k, block); });
}

void linear_run(Team& team, const LinearArgs& args) { pick_linear().run(team, args); }

}  // namespace pm

// The ungrouped products (f32, bf16, int8) and the table of all of this instruction set's linear kernels.
#include "linear/epilogue.h"
#include "linear/group.h"
#include "linear/quantize.h"
#include "linear/table.h"
#include "linear/tile.h"
#include "linear/walk.h"

namespace pm::PM_ISA {
namespace {

using SumTile = void (*)(const std::byte*, int64_t, const std::byte*, int64_t, int64_t, float*);

// Kernels for 1 .. kRows rows: two vectors wide (wide tiles), or four (few rows, where more columns in flight hide
// latency). Four portable vectors make one panel.
template <class S, int NV, int MR>
constexpr SumTile tile_or_null() {
  if constexpr (MR <= (NV == 2 ? S::kRows : S::kSkinnyRows)) {
    return &sum_tile<S, MR, NV>;
  } else {
    return nullptr;
  }
}

template <class S, int NV>
struct Tiles {
  static constexpr SumTile kByRows[12] = {
      tile_or_null<S, NV, 1>(), tile_or_null<S, NV, 2>(), tile_or_null<S, NV, 3>(),  tile_or_null<S, NV, 4>(),
      tile_or_null<S, NV, 5>(), tile_or_null<S, NV, 6>(), tile_or_null<S, NV, 7>(),  tile_or_null<S, NV, 8>(),
      tile_or_null<S, NV, 9>(), tile_or_null<S, NV, 10>(), tile_or_null<S, NV, 11>(), tile_or_null<S, NV, 12>()};
};

template <class S>
void sum_columns(const PackedLinear& w, const std::byte* act, int64_t row_bytes, int rows, int64_t column, int columns,
                 float* tile) {
  const std::byte* data = w.data.as<std::byte>();
  int done = 0;
  const auto run_over = [&](SumTile sum, int width) {
    for (; done + width <= columns; done += width) {
      const int64_t at = column + done;
      const std::byte* start = data + at / kPanel * w.panel_bytes + at % kPanel * 4;
      sum(act, row_bytes, start, w.panel_bytes, w.steps, tile + done);
    }
  };
  if (rows <= S::kSkinnyRows) run_over(Tiles<S, 4>::kByRows[rows - 1], 4 * kLanes);
  run_over(Tiles<S, 2>::kByRows[rows - 1], 2 * kLanes);
}

template <class S, class Finish>
void run_kind(Team& team, const LinearArgs& args, int64_t act_offset) {
  walk<Finish>(team, args, &sum_columns<S>, S::kRows, S::kSkinnyRows, act_offset);
}

void run(Team& team, const LinearArgs& args) {
  switch (args.w->kind) {
    case WeightKind::f32: return run_kind<StepF32, FinishFloat>(team, args, 0);
    case WeightKind::bf16:
      if constexpr (kHasDotBf16) {
        return run_kind<StepBf16, FinishFloat>(team, args, 0);
      } else {
        return run_kind<StepBf16Widened, FinishFloat>(team, args, 0);
      }
    case WeightKind::int8: return run_kind<StepInt8, FinishInt8>(team, args, kTokenHead);
    case WeightKind::group4:
    case WeightKind::group8: return run_group(team, args);
  }
}

}  // namespace

extern const LinearTable linear_table;
const LinearTable linear_table = {run, prepare_row, hadamard_row};

}  // namespace pm::PM_ISA

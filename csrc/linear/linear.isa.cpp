// The ungrouped products (f32, bf16, int8) and the table of all of this instruction set's linear kernels.
#include "linear/epilogue.h"
#include "linear/group.h"
#include "linear/quantize.h"
#include "linear/table.h"
#include "linear/tile.h"
#include "linear/walk.h"

namespace pm::PM_ISA {
namespace {

using SumTile = void (*)(const std::byte*, int64_t, const std::byte*, int64_t, const Ahead&, float*);

template <class S, int MR>
constexpr SumTile tile_or_null() {
  if constexpr (MR <= S::kRows) {
    return &sum_tile<S, MR>;
  } else {
    return nullptr;
  }
}

template <class S>
constexpr SumTile kByRows[12] = {tile_or_null<S, 1>(), tile_or_null<S, 2>(),  tile_or_null<S, 3>(),
                                 tile_or_null<S, 4>(), tile_or_null<S, 5>(),  tile_or_null<S, 6>(),
                                 tile_or_null<S, 7>(), tile_or_null<S, 8>(),  tile_or_null<S, 9>(),
                                 tile_or_null<S, 10>(), tile_or_null<S, 11>(), tile_or_null<S, 12>()};

template <class S>
void sum_panel(const PackedLinear& w, const std::byte* act, int64_t row_bytes, int rows, int64_t panel,
               const Ahead& ahead, float* tile) {
  const std::byte* start = w.data.as<std::byte>() + panel * w.panel_bytes;
  const SumTile sum = kByRows<S>[rows - 1];
  if constexpr (kPanel == 2 * kLanes) return sum(act, row_bytes, start, w.steps, ahead, tile);
  for (int column = 0; column < kPanel; column += 2 * kLanes) {
    Ahead shifted = ahead;
    shifted.data += column * 4;
    sum(act, row_bytes, start + column * 4, w.steps, shifted, tile + column);
  }
}

template <class S, class Finish>
void run_kind(Team& team, const LinearArgs& args, int64_t act_offset) {
  walk<Finish>(team, args, &sum_panel<S>, S::kRows, act_offset, {args.w->steps, 48});
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
const LinearTable linear_table = {run, prepare_row, hadamard_row, kFetchesCache};

}  // namespace pm::PM_ISA

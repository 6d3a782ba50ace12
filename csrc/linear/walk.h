// How a product is cut into tasks and tiles: the same for every kind of weights.
#pragma once

#include "linear/epilogue.h"
#include "linear/linear.h"
#include "linear/tile.h"

namespace pm::PM_ISA {

inline Ahead panel_at(const PackedLinear& w, int64_t panel) {
  return {w.data.as<std::byte>() + panel * w.panel_bytes,
          w.scales.as<uint16_t>() + panel * w.scale_panel_halves};
}

// How a kind's tiles fetch of the KV cache: at `times` places, `bytes_each` at each at the most. A tile that
// fetches is slower, by less than the attention is spared.
struct CacheFetch {
  int64_t times, bytes_each;

  // Has the next tile fetch what comes next; a line over and over once nothing is left.
  void aim(Upcoming* upcoming, Ahead& ahead) const {
    if (!kFetchesCache || upcoming == nullptr) return;
    const Upcoming::Piece piece = upcoming->take(times * bytes_each);
    if (piece.bytes > 0) ahead.cache = piece.data;
    ahead.cache_stride = (piece.bytes + times - 1) / times;
  }
};

// The lines that a tile's outputs go to, while it is summed: stores that wait for their lines held up a prefill by 3 %
// (int8, bfloat16) to 6 % (4 bits).
inline void fetch_outputs(const LinearArgs& args, int64_t first, int64_t rows, int64_t panel) {
  const int columns = args.w->gated ? kPanel / 2 : kPanel;
  for (int64_t row = first; row < first + rows; ++row) {
    const float* out = args.out + row * args.ldo + panel * columns;
    for (int c = 0; c < columns; c += 16) prefetch_to_write(out + c);
  }
}

// Sums `rows` rows of x from `act` on against one panel, into `tile`.
using SumPanel = void (*)(const PackedLinear& w, const std::byte* act, int64_t row_bytes, int rows, int64_t panel,
                          const Ahead& ahead, float* tile);

// A task is one panel against one block of rows. Within it the panel's weights stay in the first two cache levels while
// the rows pass by in tiles; a block of rows stays in the second level while the panels pass by. With a few tens of rows
// a panel takes about as long to compute as its successor takes to come from memory, so each tile of rows fetches its
// part of the successor: without that a step over 17 to 64 rows took a fifth to a third longer.
template <class Finish>
void walk(Team& team, const LinearArgs& args, SumPanel sum, int tile_rows, int64_t act_offset,
          const CacheFetch& fetch) {
  const PackedLinear& w = *args.w;
  const Activation& x = args.x;
  if (x.rows == 0) return;
  constexpr int64_t kBlockBytes = 384 << 10;
  const int64_t fitting = kBlockBytes / x.row_bytes / tile_rows * tile_rows;
  const int64_t most = fitting > 2 * tile_rows ? fitting : 2 * tile_rows;
  const int64_t blocks = (x.rows + most - 1) / most, tasks = w.panels * blocks;
  const int64_t last_of_share = team.end_of_share(tasks) - 1;
  const auto after = [&](int64_t task) {
    if (task != last_of_share) return panel_at(w, (task + 1) % w.panels);
    return args.next ? panel_at(*args.next, team.first_of_share(args.next->panels))
                     : panel_at(w, task % w.panels);
  };
  team.for_each(tasks, [&](int64_t task) {
    alignas(64) float tile[12 * kPanel];
    const int64_t block = task / w.panels, panel = task % w.panels;
    const int64_t first_row = x.rows * block / blocks, rows = x.rows * (block + 1) / blocks - first_row;
    const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
    Ahead ahead = after(task);
    ahead.stride = (kStepBytes + tiles - 1) / tiles;
    for (int64_t t = 0; t < tiles; ++t) {  // tiles of nearly equal height
      const int64_t from = first_row + rows * t / tiles, to = first_row + rows * (t + 1) / tiles;
      const int height = static_cast<int>(to - from);
      fetch.aim(args.upcoming, ahead);
      if (args.best == nullptr) fetch_outputs(args, from, height, panel);
      sum(w, x.row(from) + act_offset, x.row_bytes, height, panel, ahead, tile);
      if (args.best != nullptr) {
        finish_logits<Finish>(args, tile, from, height, panel * kPanel);
      } else {
        finish_tile<Finish>(args, tile, from, height, panel * kPanel);
      }
      ahead.data += w.panel_bytes / tiles;
    }
  });
}

}  // namespace pm::PM_ISA

// How a product is cut into tasks and tiles: the same for every kind of weights.
#pragma once

#include "linear/epilogue.h"
#include "linear/linear.h"
#include "linear/tile.h"

namespace pm::PM_ISA {

// Sums `rows` rows of x from `act` on against one panel, into `tile`.
using SumPanel = void (*)(const PackedLinear& w, const std::byte* act, int64_t row_bytes, int rows, int64_t panel,
                          float* tile);

// A task is one panel (or a few in a row) against one block of rows. Within it the panel's weights stay in the first two
// cache levels while the rows pass by in tiles; a block of rows stays in the second level while the panels pass by.
template <class Finish>
void walk(Team& team, const LinearArgs& args, SumPanel sum, int tile_rows, int64_t act_offset) {
  const PackedLinear& w = *args.w;
  const Activation& x = args.x;
  if (x.rows == 0) return;
  constexpr int64_t kBlockBytes = 384 << 10;
  const int64_t fitting = kBlockBytes / x.row_bytes / tile_rows * tile_rows;
  const int64_t block = fitting > 2 * tile_rows ? fitting : 2 * tile_rows;
  const int64_t blocks = (x.rows + block - 1) / block;
  // Several panels a ticket where there are plenty and rows are few, so that drawing tickets does not show.
  const int64_t plenty = w.panels / (16 * team.size());
  const int64_t chunk = x.rows <= tile_rows && plenty > 1 ? (plenty < 8 ? plenty : 8) : 1;
  const int64_t chunks = (w.panels + chunk - 1) / chunk;
  team.for_each(chunks * blocks, [&](int64_t task) {
    alignas(64) float tile[12 * kPanel];
    const int64_t first_row = task / chunks * block;
    const int64_t rows = x.rows - first_row < block ? x.rows - first_row : block;
    const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
    const int64_t first_panel = task % chunks * chunk;
    const int64_t last_panel = first_panel + chunk < w.panels ? first_panel + chunk : w.panels;
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      for (int64_t t = 0; t < tiles; ++t) {  // tiles of nearly equal height
        const int64_t from = first_row + rows * t / tiles, to = first_row + rows * (t + 1) / tiles;
        const int height = static_cast<int>(to - from);
        sum(w, x.row(from) + act_offset, x.row_bytes, height, panel, tile);
        finish_tile<Finish>(args, tile, from, height, panel * kPanel);
      }
    }
  });
}

}  // namespace pm::PM_ISA

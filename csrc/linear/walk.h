// How a product is cut into tasks and tiles: the same for every kind of weights.
#pragma once

#include "linear/epilogue.h"
#include "linear/linear.h"
#include "linear/tile.h"

namespace pm::PM_ISA {

// Sums `rows` rows of x from `act` on against `columns` (32 or 64) packed columns from `column` on, into `tile`.
using SumColumns = void (*)(const PackedLinear& w, const std::byte* act, int64_t row_bytes, int rows, int64_t column,
                            int columns, float* tile);

// A task is one unit of columns against one block of rows. Within it the unit's weights stay in the first two cache
// levels while the rows pass by in tiles; a block of rows stays in the second level while the units pass by.
template <class Finish>
void walk(Team& team, const LinearArgs& args, SumColumns sum, int tile_rows, int skinny_rows, int64_t act_offset) {
  const PackedLinear& w = *args.w;
  const Activation& x = args.x;
  if (x.rows == 0) return;
  const int64_t packed_columns = w.panels * kPanel;
  const int unit = x.rows <= skinny_rows ? 64 : 32;
  const int64_t units = (packed_columns + unit - 1) / unit;
  constexpr int64_t kBlockBytes = 384 << 10;
  const int64_t fitting = kBlockBytes / x.row_bytes / tile_rows * tile_rows;
  const int64_t block = fitting > 2 * tile_rows ? fitting : 2 * tile_rows;
  const int64_t blocks = (x.rows + block - 1) / block;
  // Several units a ticket where there are plenty, so that drawing tickets does not show.
  const int64_t plenty = units / (16 * team.size());
  const int64_t chunk = x.rows <= skinny_rows && plenty > 1 ? (plenty < 8 ? plenty : 8) : 1;
  const int64_t chunks = (units + chunk - 1) / chunk;
  team.for_each(chunks * blocks, [&](int64_t task) {
    alignas(64) float tile[12 * kTileColumns];
    const int64_t first_row = task / chunks * block;
    const int64_t rows = x.rows - first_row < block ? x.rows - first_row : block;
    const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
    const int64_t first_unit = task % chunks * chunk;
    const int64_t last_unit = first_unit + chunk < units ? first_unit + chunk : units;
    for (int64_t u = first_unit; u < last_unit; ++u) {
      const int64_t column = u * unit;
      const int columns = static_cast<int>(packed_columns - column < unit ? packed_columns - column : unit);
      for (int64_t t = 0; t < tiles; ++t) {  // tiles of nearly equal height
        const int64_t from = first_row + rows * t / tiles, to = first_row + rows * (t + 1) / tiles;
        const int height = static_cast<int>(to - from);
        sum(w, x.row(from) + act_offset, x.row_bytes, height, column, columns, tile);
        finish_tile<Finish>(args, tile, from, height, column, columns);
      }
    }
  });
}

}  // namespace pm::PM_ISA

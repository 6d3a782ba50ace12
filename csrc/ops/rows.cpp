#include "ops/rows.h"

#include <algorithm>

#include "core/isa.h"

namespace pm {

PM_DEFINE_PICK(RowsTable, rows)

void rope_run(Team& team, const RopeCall& call, int64_t first, int64_t count, float* memory) {
  // Whole groups where there are many tokens, else a few tasks for each rank.
  const int64_t ranks = team.size();
  const int64_t chunk = ranks == 1 ? std::max<int64_t>(count, 1) : std::clamp<int64_t>(count / (4 * ranks), 1, kGroup);
  const RowsTable& rows = pick_rows();
  team.for_each((count + chunk - 1) / chunk, [&](int64_t task) {
    const int64_t begin = first + task * chunk;
    rows.rope(call, begin, std::min(begin + chunk, first + count), memory);
  });
}

}  // namespace pm

// How a step's attention is cut into work items.
#pragma once

#include <vector>

#include "core/team.h"
#include "core/upcoming.h"
#include "ops/attention.h"

namespace pm {

// Which items a step has. Built once a step and walked by every layer with the same shape and window.
struct AttentionPlan {
  std::vector<AttentionItem> items;   // each rank's share in a run: its own rows if those lead, else of about equal cost
  std::vector<AttentionItem> merges;  // the rows of the items that were cut, tile_count the whole range
  std::vector<int32_t> members;       // of the items that several requests share
  int num_partials = 0;
  // Not 0: with so many ranks, and with no other number of them, a rank's share of the items is its share of the rows, so
  // that it reads none of this step's rows but the rank's own: one new token of each request, and no request sees a block
  // that another writes in the same step (the scheduler shares blocks only once they are computed).
  int ranks_follow_rows = 0;
  // For each rank, empty unless it lists them: what its share reads of a layer's cache, as far as that is worth fetching
  // ahead.
  std::vector<std::vector<Extent>> extents;

  // rows_stay: ranks take equal runs of rows through all that lies between two attentions. Then, where each request has one
  // new token, a rank attends for its own rows first: queries, keys and outputs are in its cache, not in another core's,
  // and it need not wait for the others before. What they have not begun when it is done it takes over.
  void build(const AttentionLayer& layer, const AttentionBatch& batch, int num_threads, bool rows_stay);
  // The extents of the calling rank, after build().
  void list_extents(const AttentionLayer& layer, const AttentionBatch& batch, const Team& team);

 private:
  void group_requests(const AttentionLayer& layer, const AttentionBatch& batch, int64_t most);
};

// Runs on every rank of a region; `memory`: attention_scratch_floats() of this rank's own. No barrier at either end. Ranks
// may come from Team::arrive: nothing is read before the first for_each, which shares out the plan's items.
void attention_run(Team& team, const AttentionPlan& plan, const AttentionCall& call, float* memory);

}  // namespace pm

// Regions whose memory is laid out for a number of ranks beforehand.
#pragma once

#include "core/team.h"

namespace pm {

// Runs plan(ranks), then f(Team&) in a region of at most so many. Another thread may change the number of ranks between
// the two: then both once more.
template <class Plan, class F>
void parallel_planned(Plan plan, F f) {
  for (bool done = false; !done;) {
    const int ranks = num_threads();
    plan(ranks);
    parallel([&](Team& team) {
      if (team.size() > ranks) return;
      f(team);
      if (team.rank() == 0) done = true;
    });
  }
}

}  // namespace pm

#include "core/ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/isa.h"
#include "core/memory.h"
#include "core/team.h"

namespace pm {

PM_DEFINE_PICK(CeilingTable, ceiling)

namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Repeats `work(team)` (the same on every rank) until the time is used up; how often a second it is done, by all ranks
// together, in the best repeat.
template <class F>
double most_often(double seconds, F work) {
  const double end = now_s() + seconds;
  double best = 0;
  do {
    parallel([&](Team& team) {
      const double begin = now_s();
      team.barrier();
      work(team);
      team.barrier();
      if (team.rank() == 0) best = std::max(best, team.size() / (now_s() - begin));
    });
  } while (now_s() < end);
  return best;
}

// Every piece of 1 MiB is timed by itself and counts with its quickest time: over a whole pass, any other process on the
// machine would be measured along. Where another thread changes the number of ranks, all is measured anew.
double read_ceiling(const CeilingTable& table, double seconds, int64_t bytes) {
  constexpr int64_t kPiece = int64_t{1} << 20;
  int ranks = 0;
  int64_t pieces = 0;
  Buffer memory;
  std::vector<double> best;
  std::atomic<uint64_t> sink{0};
  bool measured = false;
  const double end = now_s() + seconds;
  do {
    if (ranks != num_threads()) {
      ranks = num_threads();
      pieces = std::max<int64_t>(bytes / kPiece / ranks, 1);
      memory = Buffer(static_cast<size_t>(pieces * kPiece * ranks));
      std::memset(memory.as<>(), 1, memory.size());
      best.assign(static_cast<size_t>(pieces), 1e30);
      measured = false;
    }
    parallel([&](Team& team) {
      if (team.size() != ranks) return;
      if (team.rank() == 0) measured = true;
      for (int64_t i = 0; i < pieces; ++i) {
        const double begin = now_s();
        team.barrier();
        sink += table.read(memory.as<>() + (i * team.size() + team.rank()) * kPiece, kPiece);
        team.barrier();
        if (team.rank() == 0) best[static_cast<size_t>(i)] = std::min(best[static_cast<size_t>(i)], now_s() - begin);
      }
    });
  } while (now_s() < end || !measured);
  return static_cast<double>(memory.size()) / std::accumulate(best.begin(), best.end(), 0.0);
}

}  // namespace

double measure_ceiling(const char* kind, double seconds, int64_t bytes) {
  const CeilingTable& table = pick_ceiling();
  if (std::strcmp(kind, "read") == 0) return read_ceiling(table, seconds, bytes);
  const std::string name = kind;
  const auto run = name == "int8" ? table.int8 : name == "bf16" ? table.bf16 : table.f32;
  if (name != "int8" && name != "bf16" && name != "f32") {
    throw std::invalid_argument("no ceiling '" + name + "'; there are int8, bf16, f32, read");
  }
  if (run == nullptr) return 0;
  std::atomic<uint64_t> sink{0};
  constexpr int64_t kRounds = 200000;
  const double rounds = kRounds * most_often(seconds, [&](Team&) { sink += static_cast<uint64_t>(run(kRounds) != 0); });
  const int products = name == "int8" ? 4 : name == "bf16" ? 2 : 1;
  return 2.0 * products * table.lanes * 12 * rounds;
}

}  // namespace pm

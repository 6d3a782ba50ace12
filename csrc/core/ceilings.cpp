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

// Repeats `work(team)` (the same on every rank) until the time is used up; seconds of the quickest repeat.
template <class F>
double quickest_s(double seconds, F work) {
  const double end = now_s() + seconds;
  double best = 1e30;
  do {
    double begin = 0, finish = 0;
    parallel([&](Team& team) {
      if (team.rank() == 0) begin = now_s();
      team.barrier();
      work(team);
      team.barrier();
      if (team.rank() == 0) finish = now_s();
    });
    best = std::min(best, finish - begin);
  } while (now_s() < end);
  return best;
}

// Every piece of 1 MiB is timed by itself and counts with its quickest time: over a whole pass, any other process on the
// machine would be measured along.
double read_ceiling(const CeilingTable& table, double seconds, int64_t bytes) {
  constexpr int64_t kPiece = int64_t{1} << 20;
  const int64_t pieces = std::max<int64_t>(bytes / kPiece / num_threads(), 1);
  Buffer memory(static_cast<size_t>(pieces * kPiece * num_threads()));
  std::memset(memory.as<>(), 1, memory.size());
  std::vector<double> best(static_cast<size_t>(pieces), 1e30);
  std::atomic<uint64_t> sink{0};
  const double end = now_s() + seconds;
  do {
    parallel([&](Team& team) {
      for (int64_t i = 0; i < pieces; ++i) {
        const double begin = now_s();
        team.barrier();
        sink += table.read(memory.as<>() + (i * team.size() + team.rank()) * kPiece, kPiece);
        team.barrier();
        if (team.rank() == 0) best[static_cast<size_t>(i)] = std::min(best[static_cast<size_t>(i)], now_s() - begin);
      }
    });
  } while (now_s() < end);
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
  const double best = quickest_s(seconds, [&](Team&) { sink += static_cast<uint64_t>(run(kRounds) != 0); });
  const int products = name == "int8" ? 4 : name == "bf16" ? 2 : 1;
  return 2.0 * products * table.lanes * 12 * kRounds * num_threads() / best;
}

}  // namespace pm

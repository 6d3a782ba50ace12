#include "core/ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

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
      team.barrier();
      if (team.rank() == 0) begin = now_s();
      work(team);
      team.barrier();
      if (team.rank() == 0) finish = now_s();
    });
    best = std::min(best, finish - begin);
  } while (now_s() < end);
  return best;
}

}  // namespace

double measure_ceiling(const char* kind, double seconds, int64_t bytes) {
  const CeilingTable& table = pick_ceiling();
  std::atomic<uint64_t> sink{0};
  if (std::strcmp(kind, "read") == 0) {
    const int64_t share = std::max<int64_t>(bytes / num_threads() / 4096, 1) * 4096;
    Buffer memory(static_cast<size_t>(share * num_threads()));
    std::memset(memory.as<>(), 1, memory.size());
    const int64_t repeats = std::max<int64_t>(1, (int64_t{64} << 20) / share);
    const double best = quickest_s(seconds, [&](Team& team) {
      for (int64_t i = 0; i < repeats; ++i) sink += table.read(memory.as<>() + team.rank() * share, share);
    });
    return static_cast<double>(share * num_threads() * repeats) / best;
  }
  const std::string name = kind;
  const auto run = name == "int8" ? table.int8 : name == "bf16" ? table.bf16 : table.f32;
  if (name != "int8" && name != "bf16" && name != "f32") {
    throw std::invalid_argument("no ceiling '" + name + "'; there are int8, bf16, f32, read");
  }
  if (run == nullptr) return 0;
  constexpr int64_t kRounds = 200000;
  const double best = quickest_s(seconds, [&](Team&) { sink += static_cast<uint64_t>(run(kRounds) != 0); });
  const int products = name == "int8" ? 4 : name == "bf16" ? 2 : 1;
  return 2.0 * products * table.lanes * 12 * kRounds * num_threads() / best;
}

}  // namespace pm

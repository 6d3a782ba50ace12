#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "core/ceilings.h"
#include "core/isa.h"
#include "core/team.h"

namespace nb = nanobind;

namespace pm {
namespace {

std::vector<std::string> names() {
  std::vector<std::string> result;
  for (const Isa isa : available_isas()) result.emplace_back(isa_name(isa));
  return result;
}

void set_isa_by_name(const std::string& name) {
  std::string known;
  for (const Isa isa : available_isas()) {
    if (name == isa_name(isa)) return set_isa(isa);
    known += std::string(known.empty() ? "" : ", ") + isa_name(isa);
  }
  throw std::invalid_argument("no instruction set '" + name + "' here; available: " + known);
}

// Calls barrier and for_each many times and checks that every task ran exactly once: the pool's own test.
int64_t team_selftest(int64_t rounds, int64_t tasks) {
  if (rounds < 0 || tasks < 1) {
    throw std::invalid_argument("rounds is " + std::to_string(rounds) + " and tasks " + std::to_string(tasks) +
                                "; a test takes no fewer than 0 rounds of 1 task");
  }
  std::vector<std::atomic<int64_t>> seen(static_cast<size_t>(tasks));
  std::atomic<int64_t> wrong{0};
  parallel([&](Team& team) {
    for (int64_t round = 1; round <= rounds; ++round) {
      const int64_t n = 1 + (round * 7) % tasks;
      team.for_each(n, [&](int64_t i) { seen[static_cast<size_t>(i)].fetch_add(1); });
      if (round % 23 != 0) continue;  // many for_each in a row without a barrier, too
      team.barrier();
      if (team.rank() == 0) {
        std::vector<int64_t> expected(static_cast<size_t>(tasks), 0);
        for (int64_t past = 1; past <= round; ++past) {
          for (int64_t i = 0; i < 1 + (past * 7) % tasks; ++i) ++expected[static_cast<size_t>(i)];
        }
        for (int64_t i = 0; i < tasks; ++i) {
          if (seen[static_cast<size_t>(i)].load() != expected[static_cast<size_t>(i)]) wrong.fetch_add(1);
        }
      }
      team.barrier();
    }
  });
  return wrong.load();
}

}  // namespace

void register_core(nb::module_& m) {
  m.def("isa", [] { return std::string(isa_name(current_isa())); });
  m.def("available_isas", &names);
  m.def("set_isa", &set_isa_by_name, nb::arg("name"));
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, nb::arg("n"), nb::call_guard<nb::gil_scoped_release>());
  m.def("usable_cores", &usable_cores);
  m.def("measure_ceiling",
        [](const std::string& kind, double seconds, int64_t bytes) {
          nb::gil_scoped_release release;
          return measure_ceiling(kind.c_str(), seconds, bytes);
        },
        nb::arg("kind"), nb::arg("seconds") = 0.3, nb::arg("size") = int64_t{1} << 28);
  m.def("team_selftest", &team_selftest, nb::arg("rounds"), nb::arg("tasks"),
        nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace pm

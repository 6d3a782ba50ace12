// What the kernel gives this process. How many physical cores it may use: affinity, then siblings of one core counted
// once, then the cgroup's CPU quota (v2 cpu.max, v1 cpu.cfs_quota_us), which a container's CPU limit sets. And how soon
// others get a core that computes.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "core/team.h"

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pm {
namespace {

#if defined(__linux__)
std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

int cores_by_affinity() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return static_cast<int>(std::thread::hardware_concurrency());
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    const std::string dir = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    std::string siblings = first_line(dir + "core_cpus_list");
    if (siblings.empty()) siblings = first_line(dir + "thread_siblings_list");
    cores.insert(siblings.empty() ? std::to_string(cpu) : siblings);
  }
  return static_cast<int>(cores.size());
}

// The tightest quota on the way from this process's cgroup up to the root, in CPUs; a large number without one.
double quota_cpus() {
  double quota = 1e9;
  std::ifstream self("/proc/self/cgroup");
  for (std::string line; std::getline(self, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    const bool v2 = controllers.empty();
    if (!v2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    for (;;) {
      const std::string dir = (v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu") + (path == "/" ? "" : path);
      double max = -1, period = 0;
      if (v2) {
        std::istringstream fields(first_line(dir + "/cpu.max"));
        if (!(fields >> max >> period)) max = -1;  // "max 100000": no quota
      } else {
        std::istringstream(first_line(dir + "/cpu.cfs_quota_us")) >> max;
        std::istringstream(first_line(dir + "/cpu.cfs_period_us")) >> period;
      }
      if (max > 0 && period > 0) quota = std::min(quota, max / period);
      if (path.size() <= 1) break;
      path = path.substr(0, path.rfind('/'));
    }
  }
  return quota;
}
#endif

#if defined(__linux__)
// include/uapi/linux/sched/types.h, which a distribution's headers may not have.
struct SchedAttr {
  uint32_t size = sizeof(SchedAttr), policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0, deadline = 0, period = 0;
};
constexpr uint64_t kResetOnFork = 1;            // SCHED_FLAG_RESET_ON_FORK
// ns: more than the slice of anybody who asks for none (0.7 to 2.8 ms by the number of CPUs), which is what lets them
// preempt; and not so much more that two engines on the same cores wait long for each other.
constexpr uint64_t kLongSlice = 6'000'000;
#endif

}  // namespace

void take_long_slices() {
#if defined(__linux__)
  SchedAttr attr;
  if (syscall(SYS_sched_getattr, 0, &attr, sizeof attr, 0) != 0 || attr.policy != SCHED_OTHER) return;
  attr.flags |= kResetOnFork;
  attr.runtime = kLongSlice;
  syscall(SYS_sched_setattr, 0, &attr, 0);
#endif
}

int usable_cores() {
#if defined(__linux__)
  const int cores = cores_by_affinity();
  return std::clamp(static_cast<int>(std::min<double>(cores, std::floor(quota_cpus() + 0.01))), 1, 256);
#else
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 256);
#endif
}

}  // namespace pm

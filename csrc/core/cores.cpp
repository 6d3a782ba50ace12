// How many physical cores this process may use: affinity, then siblings of one core counted once, then the cgroup's
// CPU quota (v2 cpu.max, v1 cpu.cfs_quota_us), which a container's CPU limit sets.
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

}  // namespace

int usable_cores() {
#if defined(__linux__)
  const int cores = cores_by_affinity();
  return std::clamp(static_cast<int>(std::min<double>(cores, std::floor(quota_cpus() + 0.01))), 1, 256);
#else
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 256);
#endif
}

}  // namespace pm

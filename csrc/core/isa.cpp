#include "core/isa.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

namespace pm {
namespace {

#if defined(__x86_64__)
bool cpu_has(Isa isa) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  switch (isa) {
    case Isa::portable: return true;
    case Isa::avx2: return avx2;
    case Isa::avxvnni:
#ifdef PM_HAVE_AVXVNNI  // a compiler that knows -mavxvnni knows the name here
      return avx2 && __builtin_cpu_supports("avxvnni");
#else
      return false;
#endif
    case Isa::avx512: return avx512;
    case Isa::avx512bf16: return avx512 && __builtin_cpu_supports("avx512bf16");
  }
  return false;
}
#else
bool cpu_has(Isa isa) { return isa == Isa::portable; }
#endif

std::vector<Isa> detect() {
  std::vector<Isa> found = {Isa::portable};
  PM_IF_AVX2(if (cpu_has(Isa::avx2)) found.push_back(Isa::avx2);)
  PM_IF_AVXVNNI(if (cpu_has(Isa::avxvnni)) found.push_back(Isa::avxvnni);)
  PM_IF_AVX512(if (cpu_has(Isa::avx512)) found.push_back(Isa::avx512);)
  PM_IF_AVX512BF16(if (cpu_has(Isa::avx512bf16)) found.push_back(Isa::avx512bf16);)
  return found;
}

std::atomic<int>& chosen() {
  static std::atomic<int> value{static_cast<int>(available_isas().back())};
  return value;
}

}  // namespace

const char* isa_name(Isa isa) {
  constexpr const char* kNames[kNumIsas] = {"portable", "avx2", "avxvnni", "avx512", "avx512bf16"};
  return kNames[static_cast<int>(isa)];
}

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> found = detect();
  return found;
}

Isa current_isa() { return static_cast<Isa>(chosen().load(std::memory_order_relaxed)); }

void set_isa(Isa isa) {
  const auto& all = available_isas();
  if (std::find(all.begin(), all.end(), isa) == all.end()) {
    throw std::invalid_argument(std::string("instruction set '") + isa_name(isa) + "' is not available here");
  }
  chosen().store(static_cast<int>(isa), std::memory_order_relaxed);
}

}  // namespace pm

// Instruction sets: what this build has, what this CPU has, and which one runs.
//
// Kernels live in *.isa.cpp files, compiled once per set into namespace pm::<set>. Such a file must put everything it
// defines into `namespace pm::PM_ISA` (or an anonymous namespace): an inline function shared between the copies would
// be merged by the linker, and the AVX-512 one might be the survivor on a machine without it. For the same reason
// those files use no standard containers or streams.
#pragma once

#include <vector>

namespace pm {

enum class Isa : int {
  portable = 0,    // plain C++; the twin that every kernel is checked against
  avx2 = 1,        // AVX2 + FMA + F16C
  avxvnni = 2,     // the same with VEX-encoded int8 dot products (Alder Lake and later)
  avx512 = 3,      // AVX-512 F/BW/DQ/VL + VNNI (Cascade Lake, Ice Lake and later)
  avx512bf16 = 4,  // the same with bf16 dot products (Cooper Lake, Sapphire Rapids, Zen 4 and later)
};
constexpr int kNumIsas = 5;

const char* isa_name(Isa isa);
// Sets that both this build and this CPU have, weakest first. Never empty.
const std::vector<Isa>& available_isas();
// The set in force: the strongest available until set_isa is called.
Isa current_isa();
// Throws std::invalid_argument when `isa` is not available. Not to be called while kernels run.
void set_isa(Isa isa);

// A per-set table of functions: `PM_ISA_TABLE(linear)` in a header declares pm::<set>::linear_table for each set;
// PM_PICK(linear) is the one in force.
#ifdef PM_HAVE_AVX2
#define PM_IF_AVX2(x) x
#else
#define PM_IF_AVX2(x)
#endif
#ifdef PM_HAVE_AVXVNNI
#define PM_IF_AVXVNNI(x) x
#else
#define PM_IF_AVXVNNI(x)
#endif
#ifdef PM_HAVE_AVX512
#define PM_IF_AVX512(x) x
#else
#define PM_IF_AVX512(x)
#endif
#ifdef PM_HAVE_AVX512BF16
#define PM_IF_AVX512BF16(x) x
#else
#define PM_IF_AVX512BF16(x)
#endif

// Defines `const Table& pick_<name>()` over `extern const Table pm::<set>::<name>_table`. Use at namespace pm scope in
// one ordinary .cpp file; each *.isa.cpp file defines its own `<name>_table`.
#define PM_DEFINE_PICK(Table, name)                                                             \
  namespace portable { extern const Table name##_table; }                                       \
  namespace avx2 { extern const Table name##_table; }                                           \
  namespace avxvnni { extern const Table name##_table; }                                        \
  namespace avx512 { extern const Table name##_table; }                                         \
  namespace avx512bf16 { extern const Table name##_table; }                                     \
  const Table& pick_##name() {                                                                  \
    switch (current_isa()) {                                                                    \
      PM_IF_AVX2(case Isa::avx2 : return avx2::name##_table;)                                   \
      PM_IF_AVXVNNI(case Isa::avxvnni : return avxvnni::name##_table;)                          \
      PM_IF_AVX512(case Isa::avx512 : return avx512::name##_table;)                             \
      PM_IF_AVX512BF16(case Isa::avx512bf16 : return avx512bf16::name##_table;)                 \
      default: return portable::name##_table;                                                   \
    }                                                                                           \
  }

}  // namespace pm

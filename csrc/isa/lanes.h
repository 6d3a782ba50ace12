// Sixteen float lanes on the instruction set this translation unit is compiled for.
#pragma once

#include "isa/prefetch.h"

#if defined(PM_ISA_IS_AVX512) || defined(PM_ISA_IS_AVX512BF16)
#include "isa/lanes_avx512.h"
#elif defined(PM_ISA_IS_AVX2) || defined(PM_ISA_IS_AVXVNNI)
#include "isa/lanes_avx2.h"
#else
#include "isa/lanes_portable.h"
#endif

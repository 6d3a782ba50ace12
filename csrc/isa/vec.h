// The vocabulary the kernels are written in: one vector width per instruction set.
//
//   kLanes            floats in a vector: 16 (avx512*), 8 (avx2, avxvnni), 4 (portable)
//   F32, I32          vectors of kLanes floats / int32
//   load, store, load_part, store_part, splat, fma, vmin, vmax, to_f32, round_i32, as_f32, as_i32, ...
//   any_at_least      whether a >= b in any lane
//   swap_lanes<D>     lane l from lane l ^ D
//   + - * /           work on F32
//   dot8              unsigned 8-bit weights times signed 8-bit activations, 4 at a time, into int32 lanes, exactly
//                     (AVX2: of rows rounded in pairs, linear/linear.h)
//   S4, step4, ...    the same for 4-bit weights, over one group of 32
//
// Included by *.isa.cpp files only.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(PM_ISA_IS_AVX512) || defined(PM_ISA_IS_AVX512BF16)
#include "isa/vec_avx512.h"
#elif defined(PM_ISA_IS_AVX2) || defined(PM_ISA_IS_AVXVNNI)
#include "isa/vec_avx2.h"
#else
#include "isa/vec_portable.h"
#endif

#include "isa/vec_math.h"

// What each instruction set's copy of the linear kernels offers.
#pragma once

#include "linear/linear.h"

namespace pm {

struct LinearTable {
  void (*run)(Team& team, const LinearArgs& args);
  void (*prepare_row)(ActKind kind, const float* x, int64_t k, std::byte* row);
  void (*hadamard_row)(float* x, int64_t k, int64_t block);
  bool fetches_cache;  // whether run() makes use of LinearArgs::upcoming
};

const LinearTable& pick_linear();

// In place on rows of x [rows, k]; see quantize.h.
void hadamard_rows(Team& team, float* x, int64_t rows, int64_t ld, int64_t k, int64_t block);

}  // namespace pm

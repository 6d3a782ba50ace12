// The grouped products (4- and 8-bit integers with a scale per group along K); see linear_group.isa.cpp.
#pragma once

#include "linear/linear.h"

namespace pm::PM_ISA {

void run_group(Team& team, const LinearArgs& args);

}  // namespace pm::PM_ISA

// What each part of the library adds to the Python module `pagemill._native`.
#pragma once

#include <nanobind/nanobind.h>

namespace pm {
void register_core(nanobind::module_& m);     // instruction sets, threads, ceilings
void register_linear(nanobind::module_& m);   // packed weights, quantisers, matrix products
void register_ops(nanobind::module_& m);      // attention, norm, rotary, ...
void register_program(nanobind::module_& m);  // the recorded step
void register_sampling(nanobind::module_& m); // choosing tokens
}  // namespace pm

// The Python module pagemill._native. Every call that computes releases the GIL.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_native, m) {
  pm::register_core(m);
  pm::register_linear(m);
  pm::register_ops(m);
  pm::register_program(m);
  pm::register_sampling(m);
}

#include "bindings.h"

namespace pm {
void register_program(nanobind::module_&) {}
}  // namespace pm

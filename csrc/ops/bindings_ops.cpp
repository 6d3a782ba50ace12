#include "bindings.h"

namespace pm {
void register_ops(nanobind::module_&) {}
}  // namespace pm

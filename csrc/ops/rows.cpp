#include "ops/rows.h"

#include "core/isa.h"

namespace pm {
PM_DEFINE_PICK(RowsTable, rows)
}  // namespace pm

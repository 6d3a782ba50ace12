#include "linear/quantize.h"
#include "linear/table.h"

namespace pm::PM_ISA {
namespace {
void run(Team&, const LinearArgs&) {}
void prepare(ActKind kind, const float* x, int64_t k, std::byte* row) { prepare_row(kind, x, k, row); }
void hadamard(float* x, int64_t k, int64_t block) { hadamard_row(x, k, block); }
}  // namespace

extern const LinearTable linear_table;
const LinearTable linear_table = {run, prepare, hadamard};

}  // namespace pm::PM_ISA

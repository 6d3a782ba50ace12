// 2^f for |f| <= 1/2: the polynomial of degree 5 with the least relative error among those with exp2(0) = 1 exactly.
#pragma once

namespace pm::PM_ISA {

constexpr float kExp2[] = {1.3264727208e-03f, 9.6715127399e-03f, 5.5507337442e-02f,
                           2.4022242084e-01f, 6.9314697760e-01f, 1.0f};  // of the highest power first

}  // namespace pm::PM_ISA

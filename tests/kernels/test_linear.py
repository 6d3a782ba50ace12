"""The native matrix products against plain torch, on every instruction set of this machine.

Tolerances: integer kinds are exact up to the float scaling, so they are held to 1e-5 of the row's magnitude against the
same integers in float64; float kinds to the rounding of K sequential float32 additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

native = pytest.importorskip("pagemill._native")

KINDS = ("f32", "bf16", "int8", "group4", "group4_min", "group8", "group8_min", "group8_16", "group8_16_min",
         "group8_6bit_min")  # fmt: skip
ODD_SHAPES = [(1, 1, 1), (1, 16, 32), (2, 33, 31), (3, 7, 100), (5, 100, 65), (7, 96, 576), (12, 64, 64), (13, 31, 129)]


@dataclass
class Case:
    """Packed weights and what they mean: `dense` is [rows, k] float64, exactly as stored."""

    packed: native.PackedLinear
    dense: torch.Tensor
    bias: torch.Tensor | None


def make(
    kind: str, rows: int, k: int, *, gated: bool = False, bias: bool = False, group: int = 32, seed: int = 0
) -> Case:
    gen = torch.Generator().manual_seed(seed)
    base, _, rest = kind.partition("_")
    if rest.startswith("16"):
        group = 16
    has_min = kind.endswith("min")
    bits = 4 if base == "group4" else 6 if rest in ("6bit_min", "16", "16_min") else 8
    options = {"group": group, "has_min": has_min, "bits": bits} if base.startswith("group") else {}
    packed = native.PackedLinear(base, rows, k, gated=gated, bias=bias, **options)
    if base in ("f32", "bf16"):
        w = torch.randn(rows, k, generator=gen)
        w = w.bfloat16() if base == "bf16" else w
        packed.write_floats(0, w)
        dense = w.double()
    elif base == "int8":
        q = torch.randint(-128, 128, (rows, k), generator=gen, dtype=torch.int8)
        scale = torch.rand(rows, generator=gen) / 64
        packed.write_int8(0, q, scale)
        dense = q.double() * scale.double()[:, None]
    else:
        zero = 2 ** (bits - 1)
        q = torch.randint(0, 2**bits, (rows, k), generator=gen, dtype=torch.uint8)
        groups = -(-k // group)
        scale = (torch.rand(rows, groups, generator=gen) / 64).half().float()
        minimum = (torch.randn(rows, groups, generator=gen) / 8).half().float() if has_min else None
        packed.write_groups(0, q, scale, minimum=minimum, zero=zero)
        spread = scale.repeat_interleave(group, 1)[:, :k].double()
        if minimum is not None:
            dense = q.double() * spread + minimum.repeat_interleave(group, 1)[:, :k].double()
        else:
            dense = (q.double() - zero) * spread
    b = None
    if bias:
        b = torch.randn(rows, generator=gen)
        packed.write_bias(0, b)
    return Case(packed, dense, b)


def reach(runs: torch.Tensor, pairs: bool) -> torch.Tensor:
    """[..., n] -> [..., 1]: the largest magnitude, with ``pairs`` also of the sums of neighbours."""
    largest = runs.abs().amax(-1, keepdim=True)
    if pairs:
        even = torch.nn.functional.pad(runs, (0, runs.shape[-1] % 2))
        largest = torch.maximum(largest, even.unflatten(-1, (-1, 2)).sum(-1).abs().amax(-1, keepdim=True))
    return largest


def in_steps(runs: torch.Tensor, pairs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Each run [..., n] as whole numbers and their scale [..., 1]."""
    most = reach(runs, pairs)
    inverse = torch.full_like(most, 127.0) / most  # 127.0 / most would be 127 * (1 / most), and round otherwise
    return torch.where(most > 0, runs * inverse, 0.0).round(), most * (1.0 / 127.0)


def activations(form: str, x: torch.Tensor) -> torch.Tensor:
    """What the kernels see of x [m, k]: float64."""
    m, k = x.shape
    if form in ("f32", "bf16"):
        return (x if form == "f32" else x.bfloat16()).double()
    size = k if form.startswith("i8_token") else 32
    q, scale = in_steps(torch.nn.functional.pad(x, (0, -k % size)).view(m, -1, size), form.endswith("pairs"))
    return (q.double() * scale.double()).view(m, -1)[:, :k]


def reference(case: Case, x: torch.Tensor, gate: str = "silu") -> torch.Tensor:
    y = activations(case.packed.activation_kind, x) @ case.dense.T
    if case.bias is not None:
        y = y + case.bias.double()
    if case.packed.gated:
        g, u = y.chunk(2, dim=1)
        act = torch.nn.functional.silu(g) if gate == "silu" else torch.nn.functional.gelu(g, approximate="tanh")
        y = act * u
    return y


def run(case: Case, x: torch.Tensor, **options: object) -> torch.Tensor:
    out = torch.full((x.shape[0], case.packed.n), float("nan"))
    native.linear(x, case.packed, out, **options)
    return out


def assert_near(got: torch.Tensor, want: torch.Tensor, kind: str, k: int) -> None:
    # Relative to the size of the sums, not to each result: terms cancel.
    unit = want.abs().amax().item() + 1e-6
    tolerance = {"f32": 3e-7, "bf16": 3e-6}.get(kind, 3e-7) * max(16.0, k**0.5 * 4)
    assert (got.double() - want).abs().max().item() <= tolerance * unit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [*ODD_SHAPES, (60, 960, 576), (25, 96, 1536)])
def test_products_match_the_reference(isa: str, kind: str, m: int, n: int, k: int) -> None:
    case = make(kind, n, k, bias=(n % 2 == 1))
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1))
    assert_near(run(case, x), reference(case, x), kind, k)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("m", "f", "k"), [(1, 1, 8), (3, 40, 64), (14, 27, 96), (2, 1536, 576)])
def test_gated_products_match_the_reference(isa: str, kind: str, gate: str, m: int, f: int, k: int) -> None:
    case = make(kind, 2 * f, k, gated=True, bias=(f == 27))
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(2)) / k**0.5
    assert_near(run(case, x, gate=gate), reference(case, x, gate), kind, k)


@pytest.mark.parametrize("kind", KINDS)
def test_accumulates_into_strided_rows_and_leaves_the_rest(isa: str, kind: str) -> None:
    case = make(kind, 50, 70)
    x = torch.randn(9, 70, generator=torch.Generator().manual_seed(3))
    wide = torch.randn(9, 64, generator=torch.Generator().manual_seed(4))
    before = wide.clone()
    native.linear(x, case.packed, wide[:, 3:53], accumulate=True)
    assert_near(wide[:, 3:53] - before[:, 3:53], reference(case, x), kind, 70)
    assert torch.equal(wide[:, :3], before[:, :3])
    assert torch.equal(wide[:, 53:], before[:, 53:])


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_wanted_rows(isa: str, kind: str) -> None:
    case = make(kind, 100, 64)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(5))
    rows = torch.tensor([19, 0, 7, 7], dtype=torch.int32)
    out = torch.empty(4, 100)
    native.linear(x, case.packed, out, rows=rows)
    assert torch.equal(out, run(case, x)[rows.long()])


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(isa: str, kind: str) -> None:
    assert run(make(kind, 40, 48), torch.empty(0, 48)).shape == (0, 40)


@pytest.mark.parametrize("kind", ["group4", "group4_min", "group8", "group8_min"])
@pytest.mark.parametrize("group", [64, 128])
def test_larger_groups(isa: str, kind: str, group: int) -> None:
    for k in (576, 160):
        case = make(kind, 48, k, group=group)
        x = torch.randn(5, k, generator=torch.Generator().manual_seed(6))
        assert_near(run(case, x), reference(case, x), kind, k)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bytes_alone_and_in_any_batch(isa: str, kind: str, gated: bool) -> None:
    case = make(kind, 130, 200, gated=gated)
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(7))
    alone = torch.cat([run(case, x[i : i + 1]) for i in range(300)])
    for size in [*range(2, 28), 60, 64, 97, 300]:
        start = 300 - size if size % 2 else 0
        batch = run(case, x[start : start + size])
        assert batch.numpy().tobytes() == alone[start : start + size].numpy().tobytes(), size


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_do_not_depend_on_the_thread_count(isa: str, kind: str) -> None:
    case = make(kind, 500, 129)
    x = torch.randn(37, 129, generator=torch.Generator().manual_seed(8))
    results = set()
    for count in (1, 2, 3):
        native.set_num_threads(count)
        results.add(run(case, x).numpy().tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_instruction_sets_agree_where_they_round_alike(kind: str) -> None:
    """Not promised bit for bit (fused multiply-adds differ), but to float rounding."""
    case = make(kind, 64, 96)
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(9))
    before = native.isa()
    results: dict[str, list[torch.Tensor]] = {}
    for name in native.available_isas():
        native.set_isa(name)
        results.setdefault(case.packed.activation_kind, []).append(run(case, x))
    native.set_isa(before)
    for first, *others in results.values():
        for other in others:
            assert_near(other, first.double(), kind, 96)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS), group=st.sampled_from([32, 64, 128]),
    m=st.one_of(st.integers(0, 30), st.integers(58, 66)), n=st.integers(1, 150), k=st.integers(1, 300),
    gated=st.booleans(), bias=st.booleans(), num_threads=st.integers(1, 2),
    isa_name=st.sampled_from(native.available_isas()), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape(
    threads: None, kind: str, group: int, m: int, n: int, k: int, gated: bool, bias: bool, num_threads: int,
    isa_name: str, seed: int,
) -> None:  # fmt: skip
    """Near the reference; and one of the rows alone, on one thread, has the same bytes."""
    before = native.isa()
    native.set_isa(isa_name)
    try:
        case = make(kind, 2 * n if gated else n, k, gated=gated, bias=bias, group=group, seed=seed)
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed)) / k**0.5
        native.set_num_threads(num_threads)
        got = run(case, x)
        native.set_num_threads(1)
        if m > 0:
            assert_near(got, reference(case, x), kind, k)
            row = seed % m
            assert torch.equal(got[row : row + 1], run(case, x[row : row + 1]))
    finally:
        native.set_isa(before)


# The largest activation alone and beside its like, where rounding in pairs makes both half as large.
EXTREME_ROWS = torch.stack(
    [torch.full((1024,), 127.0), torch.tensor([127.0, 0.0] * 512), torch.tensor([0.0, 127.0] * 512)]
)


@pytest.mark.parametrize(
    "kind", ["int8", "group4_min", "group8", "group8_min", "group8_16", "group8_16_min", "group8_6bit_min"]
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_integers_do_not_saturate(isa: str, kind: str, sign: float) -> None:
    base, k = kind.partition("_")[0], 1024
    if base == "int8":
        packed = native.PackedLinear("int8", 4, k)
        weights = torch.tensor([-128, 127, -127, 1])
        packed.write_int8(0, weights.to(torch.int8)[:, None].expand(4, k).contiguous(), torch.ones(4))
    else:
        bits = 4 if base == "group4" else 6 if "6bit" in kind else 8
        has_min, zero = kind.endswith("min"), 0 if kind.endswith("min") else 128
        group = 16 if "16" in kind else 32
        packed = native.PackedLinear(base, 3, k, group=group, has_min=has_min, bits=bits)
        q = torch.tensor([2**bits - 1, 0, 1])
        weights = q - zero
        rows = q.to(torch.uint8)[:, None].expand(3, k).contiguous()
        ones = torch.ones(3, k // group)
        packed.write_groups(0, rows, ones, torch.zeros_like(ones) if has_min else None, zero)
    x = sign * EXTREME_ROWS
    out = run(Case(packed, torch.empty(0), None), x)
    assert out.double().equal(activations(packed.activation_kind, x).sum(1, keepdim=True) * weights)


# ------------------------------------------------------------------------------------------------ packing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_unpacking_gives_back_what_was_stored(kind: str, gated: bool) -> None:
    case = make(kind, 34, 77, gated=gated)
    out = torch.empty(34, 77)
    case.packed.unpack(out)
    assert torch.allclose(out.double(), case.dense, rtol=1e-6, atol=1e-9)
    some = torch.empty(3, 77)
    case.packed.unpack(some, rows=torch.tensor([33, 0, 20], dtype=torch.int32))
    assert torch.equal(some, out[[33, 0, 20]])


def test_rows_of_several_sources_share_one_packed_matrix() -> None:
    q, k, v = (torch.randn(r, 64) for r in (20, 5, 7))
    packed = native.PackedLinear("bf16", 32, 64)
    packed.write_floats(0, q.bfloat16())
    packed.write_floats(25, v.half())
    packed.write_floats(20, k)
    out = torch.empty(32, 64)
    packed.unpack(out)
    assert torch.equal(out, torch.cat([q, k, v.half().float()]).bfloat16().float())


def test_floats_written_to_int8_are_rounded_per_row() -> None:
    w = torch.randn(10, 40)
    packed = native.PackedLinear("int8", 10, 40)
    packed.write_floats(0, w)
    out = torch.empty(10, 40)
    packed.unpack(out)
    scale = w.abs().amax(1, keepdim=True) / 127
    assert ((out - w).abs() <= scale * 0.5001).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_shows_in_its_output_alone(isa: str, value: float) -> None:
    w = torch.randn(10, 40)
    w[3, 17] = value
    packed = native.PackedLinear("int8", 10, 40)
    packed.write_floats(0, w)
    out = torch.empty(2, 10)
    native.linear(torch.randn(2, 40), packed, out)
    assert out.isnan().sum(0).tolist() == [2 * (row == 3) for row in range(10)]


def test_float16_scales_of_any_size_are_kept_exactly() -> None:
    scale = torch.tensor([[6.1e-5, 1.2e-7, 3.4e-6, 5.96e-8], [60000.0, 1.0, 0.001, 0.02]]).half().float()
    packed = native.PackedLinear("group4", 2, 128, group=32)
    packed.write_groups(0, torch.full((2, 128), 9, dtype=torch.uint8), scale)
    out = torch.empty(2, 128)
    packed.unpack(out)
    assert torch.equal(out, scale.repeat_interleave(32, 1))


def test_four_bits_stay_four_bits() -> None:
    packed = native.PackedLinear("group4", 4096, 576, group=32)
    assert packed.nbytes <= 4096 * (576 * 4.5 / 8 + 4) + 4096


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: native.PackedLinear("int3", 1, 1), "no weight kind 'int3'"),
        (lambda: native.PackedLinear("group4", 4, 32, group=48), "group is 48"),
        (lambda: native.PackedLinear("f32", 3, 4, gated=True), "even number"),
        (lambda: native.PackedLinear("f32", 3, 4).write_floats(1, torch.zeros(3, 4)), "outside the packed matrix"),
        (lambda: native.PackedLinear("f32", 3, 4).write_floats(0, torch.zeros(3, 5)), "expected"),
        (lambda: native.linear(torch.zeros(1, 5), native.PackedLinear("f32", 3, 4), torch.zeros(1, 3)), "x is"),
        (lambda: native.set_isa("mmx"), "available: portable"),
        (
            lambda: native.PackedLinear("f32", 3, 4).write_floats(2**63 - 1, torch.zeros(3, 4)),
            "outside the packed matrix",
        ),
        (lambda: native.PackedLinear("f32", 3, 4).write_bias(-1, torch.zeros(3)), "outside the packed matrix"),
        (lambda: native.PackedLinear("f32", 1 << 40, 1 << 40), "the most is"),
        (lambda: native.PackedLinear("int8", 1, 65537), "K up to 65536, not 65537"),
        (
            lambda: native.PackedLinear("f32", 3, 4).unpack(torch.zeros(1, 4), rows=torch.tensor([3]).int()),
            "index 3; it",
        ),
        (lambda: quantize(65537), "rows of 65537 values; int8 takes up to 65536"),
        (lambda: native.hadamard(torch.zeros(1, 64), 48), "block 48 must be a power of two that divides 64"),
        (lambda: native.linear(*one_product(), gate="relu"), "no gate 'relu'"),
        (lambda: native.time_linear([None], 1, 1), "entry 0 of a list of matrices"),
        (
            lambda: native.time_linear([native.PackedLinear("f32", 3, k) for k in (4, 5)], 1, 1),
            "differ in kind or shape",
        ),
        (lambda: native.time_linear([], 1, 1), "copies is empty"),
        (lambda: native.time_linear([native.PackedLinear("f32", 3, 4)], 0, 1), "rows is 0"),
        (lambda: native.team_selftest(1, 0), "tasks 0"),
        (lambda: native.allocate_bytes(1 << 40, 1 << 40), "bytes is the most"),
        (lambda: native.measure_ceiling("int4", 0.01), "no ceiling 'int4'"),
    ],
)
def test_mistakes_are_named(make_it: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_it()  # type: ignore[operator]


def quantize(k: int) -> None:
    native.quantize_token(
        torch.ones(1, k), torch.empty(1, k, dtype=torch.int8), torch.empty(1, 1), torch.empty(1, 1, dtype=torch.int32)
    )


def one_product() -> tuple[torch.Tensor, Any, torch.Tensor]:
    return torch.zeros(1, 4), native.PackedLinear("f32", 3, 4), torch.zeros(1, 3)


# ------------------------------------------------------------------------------------------------ activations


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("k", [1, 31, 64, 577])
def test_token_quantisation(isa: str, k: int, pairs: bool) -> None:
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(10)) * 3
    x[3] = 0
    q, scale, total = torch.empty(5, k, dtype=torch.int8), torch.empty(5, 1), torch.empty(5, 1, dtype=torch.int32)
    native.quantize_token(x, q, scale, total, pairs)
    want, want_scale = in_steps(x, pairs)
    assert torch.equal(q.float(), want)
    assert torch.allclose(scale, want_scale, rtol=2e-7, atol=0)
    assert torch.equal(total, q.int().sum(1, keepdim=True, dtype=torch.int32))


@pytest.mark.parametrize("k", [1, 31, 64, 577])
@pytest.mark.parametrize("pairs", [False, True])
def test_group_quantisation(isa: str, k: int, pairs: bool) -> None:
    groups = -(-k // 32)
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(11))
    q, scale = torch.empty(3, k, dtype=torch.int8), torch.empty(3, groups)
    total = torch.empty(3, groups, dtype=torch.int32)
    native.quantize_group(x, q, scale, total, pairs)
    padded = torch.nn.functional.pad(x, (0, -k % 32)).view(3, groups, 32)
    want, want_scale = in_steps(padded, pairs)
    assert torch.allclose(scale, want_scale[:, :, 0], rtol=2e-7, atol=0)
    assert torch.equal(q.float(), want.view(3, -1)[:, :k])
    assert torch.equal(total, want.sum(2).int())


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=100))
def test_neighbours_rounded_in_pairs_stay_within_128_steps(values: list[float]) -> None:
    x = torch.tensor([values])
    k = len(values)
    q, total = torch.empty(1, k, dtype=torch.int8), torch.empty(1, 1, dtype=torch.int32)
    of_groups = torch.empty(1, -(-k // 32), dtype=torch.int32)
    for quantize_in_pairs in (
        lambda: native.quantize_token(x, q, torch.empty(1, 1), total, True),
        lambda: native.quantize_group(x, q, torch.empty(of_groups.shape), of_groups, True),
    ):
        quantize_in_pairs()
        sums = torch.nn.functional.pad(q.int(), (0, k % 2)).unflatten(-1, (-1, 2)).sum(-1)
        assert sums.abs().max() <= 128
        assert q.int().abs().max() <= 127


def test_integers_of_more_bits_than_promised_are_refused() -> None:
    packed = native.PackedLinear("group8", 1, 32, group=32, has_min=True, bits=6)
    q = torch.full((1, 32), 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="a value of more than 6 bits"):
        packed.write_groups(0, q, torch.ones(1, 1), torch.ones(1, 1), 0)
    with pytest.raises(ValueError, match="bits is 9; it is 1 to 8"):
        native.PackedLinear("group8", 1, 32, group=32, has_min=True, bits=9)


@pytest.mark.parametrize("kind", ["group4_min", "group8"])
def test_groups_of_very_different_size_lose_nothing_and_overflow_nowhere(isa: str, kind: str) -> None:
    case = make(kind, 33, 640)
    x = torch.randn(9, 640, generator=torch.Generator().manual_seed(14))
    x[1] *= torch.logspace(30, -30, 640)
    x[2] *= torch.logspace(-30, 30, 640)
    x[3, :64] *= 1e30
    x[4, 64:] = 0
    x[5, :576] = 0
    x[6] = 0
    x[7] *= 1e-34
    x[8, 100:400] *= 1e-12
    want, got = reference(case, x), run(case, x)
    unit = want.abs().amax(1, keepdim=True) + 1e-35
    assert ((got.double() - want).abs() / unit).max() < 3e-5


@pytest.mark.parametrize("pairs", [False, True])
def test_values_too_small_for_a_scale_are_zeros(isa: str, pairs: bool) -> None:
    x = torch.zeros(1, 64)
    x[0, :2] = torch.tensor([1e-37, -1e-37])
    q, total = torch.empty(1, 64, dtype=torch.int8), torch.empty(1, 1, dtype=torch.int32)
    native.quantize_token(x, q, torch.empty(1, 1), total, pairs)
    assert not q.any()
    native.quantize_group(x, q, torch.empty(1, 2), torch.empty(1, 2, dtype=torch.int32), pairs)
    assert not q.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 100, 639])
@pytest.mark.parametrize("kind", ["int8", "group4_min", "group8_16"])
def test_a_row_that_is_not_finite_shows_in_its_outputs_alone(isa: str, kind: str, bad: float, at: int) -> None:
    case = make(kind, 33, 640)
    x = torch.randn(3, 640, generator=torch.Generator().manual_seed(15))
    clean = run(case, x)
    x[1, at] = bad
    got = run(case, x)
    assert not torch.isfinite(got[1]).any()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32, 64, 128, 512])
def test_hadamard_is_orthonormal_and_its_own_inverse(isa: str, block: int) -> None:
    x = torch.randn(4, 3 * block, generator=torch.Generator().manual_seed(12))
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    want = (x.double().view(4, 3, block) @ matrix.double() / block**0.5).view(4, 3 * block)
    y = x.clone()
    native.hadamard(y, block)
    assert torch.allclose(y.double(), want, atol=1e-5)
    native.hadamard(y, block)
    assert torch.allclose(y, x, atol=1e-5)

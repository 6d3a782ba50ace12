"""The native picker against the reference, on every instruction set that this machine has."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pagemill.params import SamplingParams
from pagemill.sampling.noise import uniforms
from pagemill.sampling.picker import TorchPicker
from pagemill.sampling.table import RowRequest, SamplingTable

native = pytest.importorskip("pagemill._native")
from pagemill.sampling.native import NativePicker  # noqa: E402

VOCABS = [1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 1000, 49152]
FILTERS: list[dict[str, float | int]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1e-4},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 0.0001},
    {"top_p": 0.999999},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.5, "min_p": 0.01, "temperature": 1.7},
]


@pytest.fixture(params=native.available_isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    best = native.available_isas()[-1]
    native.set_isa(request.param)
    yield str(request.param)
    native.set_isa(best)


def table_for(filters: list[dict[str, float | int]]) -> SamplingTable:
    table = SamplingTable(len(filters))
    for row, values in enumerate(filters):
        params = SamplingParams.create(**values)
        table.set(row, RowRequest(params=params, seed=row * 7919, token_ids=np.zeros(0, np.int32), num_prompt_tokens=0))
    return table


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_best_token_its_logit_and_finiteness(vocab: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)).round(decimals=1)  # with ties
    logits[1, vocab // 2] = torch.nan
    logits[2, vocab - 1] = torch.inf
    logits[3, 0] = -torch.inf
    logits[4] = -torch.inf
    logits[5] = 3.0
    best, highest, finite = NativePicker().best(logits)
    expected, _, _ = TorchPicker().best(logits)
    sound = [0, 2, 3, 4, 5] if vocab > 1 else [0, 5]
    assert best[sound].tolist() == expected[sound].tolist()
    assert finite.tolist() == [True, False, False, False, False, True]
    assert highest[[0, 5]].tolist() == logits[[0, 5]].amax(1).tolist()
    assert np.isneginf(highest[4])


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_best_of_the_allowed_tokens(vocab: int) -> None:
    mask = np.random.default_rng(vocab).integers(-(2**31), 2**31, (4, -(-vocab // 32)), np.int32)
    mask[1], mask[2], mask[3] = 0, -1, 0
    mask[3, (vocab - 1) // 32] = np.uint32(1 << (vocab - 1) % 32).astype(np.int32)  # the last token alone
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)).round(decimals=1)
    before = logits.clone()
    index = np.array([5, 0, 2, 1])
    best, highest = NativePicker().best_allowed(logits, index, mask)
    expected, expected_highest = TorchPicker().best_allowed(logits, index, mask)
    assert torch.equal(logits, before), "the logits are only read"
    told = np.flatnonzero(~np.isneginf(highest))
    assert {2, 3} <= set(told.tolist())
    assert best[told].tolist() == expected[told].tolist()
    assert highest.tolist() == expected_highest.tolist()
    assert best[3] == vocab - 1
    assert np.isneginf(highest[1])


@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_agree_with_the_reference(vocab: int) -> None:
    repeats = 20 if vocab < 40_000 else 2
    filters = FILTERS * repeats
    logits = torch.randn(len(filters), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    if vocab > 2:
        logits[::3, 1] = -torch.inf
    table, rows = table_for(filters), np.arange(len(filters))
    positions = rows * 3 + 1
    drawn = NativePicker().draw(logits, rows, table, rows, positions)
    expected = TorchPicker().draw(logits.clone(), rows, table, rows, positions)
    # exp differs in the last bits, so a draw that falls between two tokens may go either way; hardly any does.
    assert np.count_nonzero(drawn != expected) <= len(filters) // 100
    assert all(torch.isfinite(logits[row, token]) for row, token in enumerate(drawn.tolist()))


@pytest.mark.parametrize("vocab", VOCABS)
def test_flat_rows_whose_filters_keep_most_tokens_agree_too(vocab: int) -> None:
    filters: list[dict[str, float | int]] = [{"top_p": 0.95}, {"top_p": 0.5}, {"top_k": 300, "top_p": 0.9}] * 5
    logits = torch.randn(15, vocab, generator=torch.Generator().manual_seed(vocab)) / 4
    logits[5:10] = logits[5:10].round(decimals=1)  # many equal weights
    table, rows = table_for(filters), np.arange(15)
    drawn = NativePicker().draw(logits, rows, table, rows, rows)
    assert drawn.tolist() == TorchPicker().draw(logits.clone(), rows, table, rows, rows).tolist()


@pytest.mark.parametrize("vocab", VOCABS)
def test_forbidden_tokens_are_those_whose_bit_is_0(vocab: int) -> None:
    mask = np.random.default_rng(vocab).integers(-(2**31), 2**31, (4, -(-vocab // 32)), np.int32)
    mask[1], mask[2] = 0, -1
    logits = torch.randn(6, vocab)
    expected = logits.clone()
    index = np.array([4, 1, 5, 0])
    TorchPicker().forbid(expected, index, mask)
    NativePicker().forbid(logits, index, mask)
    assert torch.equal(logits, expected)
    assert torch.isneginf(logits[1]).all()
    assert torch.isfinite(logits[[2, 3, 5]]).all()


@pytest.mark.parametrize("vocab", VOCABS)
def test_log_probabilities_ranks_and_the_best(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(9, vocab, generator=generator) * 4
    logits[3:6] = logits[3:6].round()  # with ties
    logits[6] *= 1000
    index = np.array([8, 0, 3, 4, 5, 6, 1])
    chosen = np.random.default_rng(0).integers(0, vocab, len(index))
    for most in {0, min(vocab, 1), min(vocab, 20)}:
        told = NativePicker().logprobs(logits, index, chosen, most)
        expected = TorchPicker().logprobs(logits, index, chosen, most)
        assert told.best.tolist() == expected.best.tolist()
        assert told.rank.tolist() == expected.rank.tolist()
        np.testing.assert_allclose(told.value, expected.value, rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(told.best_value, expected.best_value, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("most", [3, 40])
def test_log_probabilities_of_a_row_that_is_not_finite_come_to_an_end(bad: float, most: int) -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(5))
    logits[1, 7] = bad
    index, chosen = np.array([0, 1]), np.array([7, 7])
    told = NativePicker().logprobs(logits, index, chosen, most)
    sound = NativePicker().logprobs(logits[:1], index[:1], chosen[:1], most)
    assert told.best[0].tolist() == sound.best[0].tolist()
    assert len(set(told.best[1].tolist())) == most
    assert (told.best[1][0] == 7) == (bad > 0)


def test_equal_weights_count_by_ascending_id() -> None:
    logits = torch.zeros(200, 500)
    rows = np.arange(200)
    for filters, most in (({"top_k": 5}, 5), ({"top_p": 0.125}, 63)):
        drawn = NativePicker().draw(logits, rows, table_for([filters] * 200), rows, rows)
        assert drawn.max() < most
        assert len(set(drawn.tolist())) > most // 2


def test_a_row_draws_the_same_whoever_is_beside_it_and_on_any_number_of_threads() -> None:
    filters = FILTERS * 3
    logits = torch.randn(len(filters), 3001, generator=torch.Generator().manual_seed(0))
    table, rows = table_for(filters), np.arange(len(filters))
    together = NativePicker().draw(logits, rows, table, rows, rows)
    before = native.num_threads()
    try:
        native.set_num_threads(1)
        alone = [
            int(NativePicker().draw(logits, rows[i : i + 1], table, rows[i : i + 1], rows[i : i + 1])[0]) for i in rows
        ]
        backwards = NativePicker().draw(logits, rows[::-1].copy(), table, rows[::-1], rows[::-1].copy())
    finally:
        native.set_num_threads(before)
    assert alone == together.tolist() == backwards[::-1].tolist()


def test_the_native_noise_is_the_defined_one() -> None:
    """Over equal weights a draw is the uniform number times the size of the vocabulary."""
    rows = np.arange(300)
    table = table_for([{}] * 300)
    table.seed[:] = np.random.default_rng(0).integers(0, 2**64, 300, np.uint64)
    positions = np.random.default_rng(1).integers(0, 2**40, 300)
    drawn = NativePicker().draw(torch.zeros(300, 4096), rows, table, rows, positions)
    assert drawn.tolist() == np.floor(uniforms(table.seed, positions) * 4096).astype(int).tolist()


def test_no_rows() -> None:
    none = np.zeros(0, np.int64)
    empty = torch.zeros(0, 17)
    best, highest, finite = NativePicker().best(empty)
    assert best.size == highest.size == finite.size == 0
    assert NativePicker().draw(empty, none, table_for([{}]), none, none).size == 0
    NativePicker().forbid(empty, none, np.zeros((0, 1), np.int32))
    assert NativePicker().best_allowed(empty, none, np.zeros((0, 1), np.int32))[0].shape == (0,)
    assert NativePicker().logprobs(empty, none, none, 3).best.shape == (0, 3)


def test_shapes_that_do_not_fit_are_refused() -> None:
    rows = np.arange(2)
    with pytest.raises(ValueError, match="index names a row"):
        NativePicker().draw(torch.zeros(2, 8), rows + 1, table_for([{}] * 2), rows, rows)
    ones = np.full((2, 1), -1, np.int32)
    for index in (rows + 1, rows - 1):
        with pytest.raises(ValueError, match="index names a row"):
            NativePicker().best_allowed(torch.zeros(2, 8), index, ones)
        with pytest.raises(ValueError, match="index names a row"):
            NativePicker().forbid(torch.zeros(2, 8), index, ones)
    with pytest.raises(ValueError, match="mask must be"):
        NativePicker().best_allowed(torch.zeros(2, 33), rows, ones)
    with pytest.raises(ValueError, match="best has 3 entries, expected 2"):
        native.row_extremes(torch.zeros(2, 8), np.zeros(3, np.int64), np.zeros(2, np.float32), np.zeros(2, np.bool_))


def drawn(logits: torch.Tensor, **values: float) -> int:
    """One draw from row 0, with parameters as they come."""
    given = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0} | values
    columns = {name: np.array([value], np.float32) for name, value in given.items()}
    out, one = np.empty(1, np.int64), np.zeros(1, np.int64)
    native.draw_rows(
        logits, one, top_k=np.zeros(1, np.int32), seed=np.ones(1, np.uint64), position=one, out=out, **columns
    )
    return int(out[0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 1e-40}, "temperature 9.99995e-41 is below"),
        ({"temperature": 0.0}, "temperature 0 is below"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"min_p": 1.5}, "min_p is 1.5; it must be from 0 to 1"),
        ({"min_p": -0.5}, "min_p is -0.5"),
        ({"min_p": float("nan")}, "min_p is nan"),
        ({"top_p": -1.0}, "top_p is -1; it must not be negative"),
        ({"top_p": float("nan")}, "top_p is nan"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(values: dict[str, float], message: str) -> None:
    """Token 0 would be drawn, whatever the logits."""
    with pytest.raises(ValueError, match=message):
        drawn(torch.randn(1, 100), **values)


@pytest.mark.parametrize("values", [{"temperature": 2e-38}, {"min_p": 1.0}, {"top_p": 0.0}])
def test_parameters_at_their_limits_take_the_best_token(values: dict[str, float]) -> None:
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(1))
    assert drawn(logits, **values) == int(logits.argmax())


def test_logits_without_columns_are_refused() -> None:
    empty, one = torch.zeros(1, 0), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="logits has 0 columns"):
        drawn(empty)
    with pytest.raises(ValueError, match="logits has 0 columns"):
        NativePicker().logprobs(empty, one, one, 0)


@pytest.mark.parametrize(
    ("name", "dtype"), [("best", np.int32), ("highest", np.float64), ("finite", np.uint8), ("logits", np.float64)]
)
def test_arrays_of_another_type_are_refused(name: str, dtype: type) -> None:
    """Not filled in as a copy that is lost."""
    arrays = {"logits": np.zeros((2, 8), np.float32), **NativePicker().best(torch.zeros(2, 8))._asdict()}
    arrays[name] = arrays[name].astype(dtype)
    with pytest.raises(ValueError, match=f"is {np.dtype(dtype)} "):
        native.row_extremes(**arrays)

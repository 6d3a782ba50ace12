"""The recorded step against the reference ops, on every family, and its independence of load."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from pagemill import _native
from pagemill.config import EngineConfig
from pagemill.core.kv_cache import KVCacheSpec
from pagemill.kernels.ops import StepInputs
from pagemill.kernels.reference import KVLayer, ReferenceOps
from pagemill.models.checkpoint import open_checkpoint
from pagemill.models.decoder import Decoder
from pagemill.models.loader import load_model
from pagemill.models.sources import resolve_source
from pagemill.sampling.native import NativePicker, empty_extremes
from pagemill.sampling.picker import Extremes
from pagemill.worker.native import NativeBackend
from tests.models.tiny import FAMILIES, VOCAB_SIZE, tiny_checkpoint
from tests.models.tiny_bert import tiny_bert, tiny_cross_encoder

BLOCK = 16
BLOCKS_A_ROW = 8
MAX_TOKENS = 512


@pytest.fixture(scope="module")
def decoder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Decoder]:
    folder = tmp_path_factory.mktemp("tiny")
    loaded: dict[str, Decoder] = {}

    def make(family: str) -> Decoder:
        if family not in loaded:
            path: Path = tiny_checkpoint(family, folder / family)
            checkpoint = open_checkpoint(resolve_source(str(path)))
            config = EngineConfig(model=str(path), dtype="float32")
            loaded[family] = load_model(checkpoint, config, native=False)
            checkpoint.close()
        return loaded[family]

    return make


class Rows:
    """Sequences in shuffled blocks, stepped through the native program or the reference."""

    def __init__(self, decoder: Decoder, rows: int, *, seed: int = 0, kv: torch.dtype = torch.float32) -> None:
        order = torch.randperm(rows * BLOCKS_A_ROW, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        self.decoder, self.tables, self.lengths = decoder, order.view(rows, -1), [0] * rows
        self.groups = 1 + max(spec.group for spec in decoder.attention_specs)
        specs = [
            KVCacheSpec(
                kind="full",
                layers=tuple(spec.layer for spec in decoder.attention_specs if spec.group == group),
                block_size=BLOCK,
                bytes_per_block=0,
                num_blocks=order.numel(),
            )
            for group in range(self.groups)
        ]
        self.native = NativeBackend(
            decoder, specs, kv, torch.device("cpu"), max_tokens=MAX_TOKENS, max_logits=MAX_TOKENS
        )
        self.caches = [
            KVLayer(order.numel(), BLOCK, spec.num_kv_heads, spec.head_dim, kv, torch.device("cpu"))
            for spec in decoder.attention_specs
        ]

    def inputs(self, new: dict[int, list[int]], wanted: str = "all") -> StepInputs:
        """Append tokens to some rows; logits of all tokens, or of each row's last."""
        tokens, positions, slots, starts, lengths = [], [], [], [0], []
        for row, ids in new.items():
            place = range(self.lengths[row], self.lengths[row] + len(ids))
            tokens += ids
            positions += place
            slots += [int(self.tables[row, p // BLOCK]) * BLOCK + p % BLOCK for p in place]
            self.lengths[row] += len(ids)
            starts.append(len(tokens))
            lengths.append(self.lengths[row])
        rows = range(len(tokens)) if wanted == "all" else [end - 1 for end in starts[1:]]

        def ints(values: object) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int32)  # type: ignore[call-overload]

        return StepInputs(
            token_ids=ints(tokens),
            positions=ints(positions),
            query_start=ints(starts),
            context_lens=ints(lengths),
            slot_mapping=[ints(slots)] * self.groups,
            block_tables=[self.tables[list(new)].contiguous()] * self.groups,
            logits_rows=ints(rows),
        )

    def reference(self, inputs: StepInputs) -> torch.Tensor:
        with torch.inference_mode():
            return self.decoder.forward(ReferenceOps(inputs, self.caches))


def tokens(n: int, seed: int) -> list[int]:
    return torch.randint(5, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_the_reference(isa: str, family: str, decoder_of: Callable[[str], Decoder]) -> None:
    """Chunks and decodes mixed, float32 throughout: only the order of sums differs."""
    rows = Rows(decoder_of(family), 3)
    steps = [
        {0: tokens(37, 1)},
        {0: tokens(1, 2), 1: tokens(20, 3)},
        {2: tokens(5, 4), 0: tokens(1, 5), 1: tokens(60, 6)},
    ]
    for i, new in enumerate(steps):
        inputs = rows.inputs(new, "all" if i % 2 else "last")
        got, extremes = rows.native.forward(inputs)
        torch.testing.assert_close(got, rows.reference(inputs), atol=2e-4, rtol=1e-3)
        same_extremes(extremes, NativePicker().best(got))


def same_extremes(got: Extremes | None, want: Extremes) -> None:
    assert got is not None
    for mine, other in zip(got, want, strict=True):
        assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize(("kind", "bias"), [("f32", False), ("bf16", True), ("int8", False), ("int8", True)])
@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 1003), (13, 1009), (64, 999)])
def test_the_best_is_found_as_logits_are_computed(
    isa: str, kind: Any, bias: bool, num_rows: int, vocab: int, threads: None
) -> None:
    """Small integers, so that many logits are equal; a vocabulary that ends within a panel; a row of infinities."""
    width = 8
    draw = torch.Generator().manual_seed(num_rows)
    table = torch.randint(-2, 3, (vocab, width), generator=draw).float()
    table[0] = 2.0
    ids = torch.randint(1, vocab, (num_rows,), generator=draw, dtype=torch.int32)
    embedding, head = _native.PackedLinear("f32", vocab, width), _native.PackedLinear(kind, vocab, width, bias=bias)
    head.write_floats(0, table)
    if bias:
        head.write_bias(0, torch.randint(-1, 2, (vocab,), generator=draw).float())
    if num_rows > 1:
        ids[-1] = 7
        table[7, 3] = torch.inf
    embedding.write_floats(0, table)
    program = _native.Program(64, 64, 16)
    x, act = program.floats(width, logits=True), program.activation(head, logits=True)
    program.embed(embedding, 1.0, states := program.floats(width))
    program.rows(states, width, out=x, act=act, weight=head, gather=True, logits=True)
    program.linear(act, head, -1, logits=True, find_best=True)
    program.finish()
    ints = torch.arange(num_rows + 1, dtype=torch.int32)

    def run(kept: torch.Tensor, logits: torch.Tensor) -> Extremes:
        found = empty_extremes(num_rows)
        program.run(ids, ints[:-1], ints, ints[1:], [], [], ints[:-1], logits, kept, *found)
        return found

    whole = torch.empty(64, vocab)
    for count in (1, 2, 4):
        _native.set_num_threads(count)
        same_extremes(run(torch.ones(num_rows, dtype=torch.bool), whole), NativePicker().best(whole[:num_rows]))
        kept = torch.arange(num_rows) % 3 == 1
        some = torch.full((64, vocab), -7.0)
        same_extremes(run(kept, some), NativePicker().best(whole[:num_rows]))
        assert torch.equal(some[:num_rows][kept].nan_to_num(), whole[:num_rows][kept].nan_to_num())
        some[:num_rows][kept] = -7.0
        assert (some == -7.0).all()


def test_an_int8_cache_is_near_the_reference(isa: str, decoder_of: Callable[[str], Decoder]) -> None:
    """The native kernels round queries and probabilities too, the reference only what it keeps."""
    rows = Rows(decoder_of("llama"), 2, kv=torch.int8)
    for new in ({0: tokens(37, 1), 1: tokens(3, 2)}, {0: tokens(1, 3), 1: tokens(40, 4)}):
        inputs = rows.inputs(new)
        want = rows.reference(inputs)
        assert torch.linalg.norm(rows.native.forward(inputs).rows - want) < 0.05 * torch.linalg.norm(want)


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float32, torch.int8], ids=["bf16", "f32", "i8"])
def test_bytes_do_not_depend_on_load(
    isa: str, kv: torch.dtype, decoder_of: Callable[[str], Decoder], threads: None
) -> None:
    """Logits of a prompt and a few decodes: alone, chunked, among others, on 1 and 2 threads."""
    decoder = decoder_of("llama")
    ids = tokens(100, 7)

    def run(chunk: int, num_threads: int, others: int) -> torch.Tensor:
        _native.set_num_threads(num_threads)
        rows = Rows(decoder, 1 + others, seed=chunk, kv=kv)
        got = []
        for at in range(0, len(ids), chunk):
            new = {row: tokens(1 + row % 3, row + at) for row in range(1, 1 + others) if rows.lengths[row] < 100}
            new[0] = ids[at : at + chunk]
            inputs = rows.inputs(new)
            got.append(rows.native.forward(inputs).rows[-len(new[0]) :].clone())
        return torch.cat(got)

    alone = run(100, 1, 0)
    assert torch.isfinite(alone).all()
    for chunk, num_threads, others in [(1, 2, 0), (7, 1, 5), (64, 2, 2), (100, 2, 40)]:
        assert torch.equal(alone, run(chunk, num_threads, others)), (chunk, num_threads, others)


def test_another_engine_may_change_the_number_of_threads_meanwhile(
    decoder_of: Callable[[str], Decoder], changing_threads: None
) -> None:
    rows = Rows(decoder_of("llama"), 2)
    rows.native.forward(rows.inputs({0: tokens(100, 1), 1: tokens(30, 2)}))
    last = rows.inputs({0: tokens(1, 3), 1: tokens(20, 4)})
    want = rows.native.forward(last).rows.clone()
    assert all(torch.equal(rows.native.forward(last).rows, want) for _ in range(200))


@pytest.mark.parametrize("make", [tiny_bert, tiny_cross_encoder])
def test_an_encoder_equals_the_reference(isa: str, make: Callable[[Path], Path], tmp_path: Path) -> None:
    """Several inputs in a step; states of all tokens, then of the first ones alone."""
    checkpoint = open_checkpoint(resolve_source(str(make(tmp_path / "model"))))
    model = load_model(checkpoint, EngineConfig(dtype="float32"), native=False)
    checkpoint.close()
    for wanted in ("all", "first"):
        rows = Rows(model, 3)
        inputs = rows.inputs(
            {row: [token % 70 for token in tokens(length, row)] for row, length in enumerate((1, 33, 90))}
        )
        if wanted == "first":
            inputs.logits_rows = inputs.query_start[:-1].clone()
        got = rows.native.forward(inputs).rows
        torch.testing.assert_close(got, rows.reference(inputs), atol=1e-4, rtol=1e-4)


def test_a_step_without_logits_only_writes_the_cache(decoder_of: Callable[[str], Decoder]) -> None:
    rows = Rows(decoder_of("llama"), 1)
    first = rows.inputs({0: tokens(30, 8)}, "last")
    rows.reference(first)
    first.logits_rows = first.logits_rows[:0]
    assert rows.native.forward(first).rows.shape == (0, VOCAB_SIZE)
    then = rows.inputs({0: tokens(1, 9)})
    torch.testing.assert_close(rows.native.forward(then).rows, rows.reference(then), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_ids", VOCAB_SIZE, "outside the vocabulary"),
        ("positions", 1 << 20, "past the rotary table"),
        ("logits_rows", 99, "not in the step"),
        ("context_lens", 4000, "longer than its block table"),
    ],
)
def test_wild_indices_are_errors(name: str, value: int, message: str, decoder_of: Callable[[str], Decoder]) -> None:
    rows = Rows(decoder_of("llama"), 1)
    inputs = rows.inputs({0: tokens(5, 10)}, "last")
    getattr(inputs, name)[-1] = value
    with pytest.raises(ValueError, match=message):
        rows.native.forward(inputs)


# ------------------------------------------------------------------------------------------------ programs by hand


def embedding(rows: int = 8, width: int = 16) -> _native.PackedLinear:
    """Row i is i, all along."""
    packed = _native.PackedLinear("f32", rows, width)
    packed.write_floats(0, torch.arange(rows).float()[:, None].expand(rows, width).contiguous())
    return packed


class Step:
    """The arrays of a step of one request, to be changed before it runs."""

    def __init__(self, num_tokens: int = 2, width: int = 16, groups: int = 0) -> None:
        ints = torch.arange(num_tokens, dtype=torch.int32)
        self.arrays: dict[str, Any] = {
            "token_ids": ints,
            "positions": ints,
            "query_start": torch.tensor([0, num_tokens], dtype=torch.int32),
            "context_lens": torch.tensor([num_tokens], dtype=torch.int32),
            "slot_mapping": [ints] * groups,
            "block_tables": [torch.zeros(1, 1, dtype=torch.int32)] * groups,
            "logits_rows": ints,
            "logits": torch.zeros(num_tokens, width),
            "logits_kept": torch.ones(num_tokens, dtype=torch.bool),
            **empty_extremes(num_tokens)._asdict(),
        }

    def run(self, program: _native.Program, **changed: Any) -> torch.Tensor:
        arrays = self.arrays | changed
        program.run(**arrays)
        logits: torch.Tensor = arrays["logits"]
        return logits


def positions_program(table: Any) -> _native.Program:
    """Its result is the table's rows at the step's positions."""
    program = _native.Program(4, 4)
    program.embed(embedding(), 1.0, program.floats(16))
    program.positions(table, out := program.floats(16))
    program.rows(out, 16, gather=True, logits=True, result=True)
    program.finish()
    return program


@pytest.mark.parametrize("to", [torch.Tensor.clone, torch.Tensor.numpy], ids=["torch", "numpy"])
def test_what_a_program_points_into_lives_as_long(to: Callable[[torch.Tensor], Any]) -> None:
    """Also if the tensor is given other memory meanwhile, or the array is dropped."""
    table = to(torch.arange(16.0 * (1 << 16)).view(-1, 16))
    program = positions_program(table)
    if isinstance(table, torch.Tensor):
        table.data = torch.zeros(1)
    del table
    torch.full((1 << 20,), -1.0)  # where the memory was
    assert torch.equal(Step().run(program), torch.arange(32.0).view(2, 16))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("token_ids", torch.Tensor.long, "is int64 [2] of strides [1], but must be int32 [*]"),
        ("token_ids", torch.Tensor.float, "is float32 [2]"),
        ("query_start", torch.Tensor.long, "is int64 [2]"),
        ("logits", torch.Tensor.double, "is float64 [2, 16]"),
        ("logits_kept", torch.Tensor.int, "but must be bool"),
        (
            "best",
            lambda best: best.astype(np.int32),
            "is int32 [2] of strides [1], but must be int64 [*], contiguous, wr",
        ),
        ("highest", lambda highest: highest.astype(np.float64), "is float64 [2]"),
        ("finite", lambda finite: finite.astype(np.uint8), "is uint8 [2]"),
        ("slot_mapping", lambda _: [torch.zeros(2)], "is float32 [2] of strides [1], but must be int32"),
        ("block_tables", lambda _: [torch.zeros(2, 4, dtype=torch.int32)[:, ::2]], "strides [4, 2]"),
    ],
)
def test_a_step_s_arrays_are_taken_as_they_are_or_refused(
    name: str, change: Callable[[Any], Any], message: str
) -> None:
    step = Step()
    program = positions_program(torch.zeros(8, 16))
    with pytest.raises(ValueError, match=re.escape(message)):
        step.run(program, **{name: change(step.arrays[name])})


def layer(block_size: int = 16) -> _native.AttentionLayer:
    return _native.AttentionLayer(
        kv_type=1, block_size=block_size, num_heads=1, num_kv_heads=1, head_dim=16, scale=0.25
    )


def cache(num_blocks: int, block_size: int = 16) -> torch.Tensor:
    return torch.zeros(num_blocks, _native.kv_block_bytes(1, block_size, 1, 16), dtype=torch.uint8)


class Recording:
    """A program with a buffer of each kind, for one instruction more."""

    def __init__(self) -> None:
        self.program = _native.Program(8, 4)
        self.x = self.program.floats(16)
        self.y = self.program.floats(64)
        self.late = self.program.floats(16, logits=True)
        self.weight = _native.PackedLinear("f32", 32, 16)
        self.act = self.program.activation(self.weight)


Record = Callable[[Recording, _native.Program], object]


def matrix(kind: Literal["f32", "int8"]) -> _native.PackedLinear:
    return _native.PackedLinear(kind, 16, 16)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda r, p: p.floats(0), "has 0 columns; it takes 1 to"),
        (lambda r, p: p.floats(1 << 62), "columns; it takes 1 to"),
        (
            lambda r, p: p.embed(embedding(4, 32), 1.0, r.x),
            "rows of 64 bytes, but the instruction needs 128; declare it",
        ),
        (
            lambda r, p: p.embed(embedding(), 1.0, r.late),
            "holds the rows with logits, but the instruction runs over all",
        ),
        (lambda r, p: p.embed(embedding(), 1.0, 9), "out is buffer 9, which was not declared; there are 4"),
        (lambda r, p: p.positions(torch.zeros(4, 32), r.x), "needs 128"),
        (lambda r, p: p.layer_norm(r.x, r.y, torch.ones(32), torch.ones(32), 0.1), "source (buffer 0) has rows of 64"),
        (
            lambda r, p: p.layer_norm(r.y, r.x, torch.ones(32), torch.ones(32), 0.1),
            "out (buffer 0) has rows of 64 bytes",
        ),
        (lambda r, p: p.activate(r.x, 17, "gelu"), "needs 68"),
        (
            lambda r, p: p.activate(r.x, 16, "gelu", logits=True),
            "holds all tokens, but the instruction runs over the rows",
        ),
        (lambda r, p: p.rows(r.x, 32, out=r.y), "source (buffer 0) has rows of 64 bytes"),
        (lambda r, p: p.rows(r.y, 32, out=r.x), "out (buffer 0) has rows of 64 bytes"),
        (lambda r, p: p.rows(r.y, 16, out=r.late), "out (buffer 2) holds the rows with logits"),
        (lambda r, p: p.rows(r.x, 16, out=r.x, gather=True), "set logits=True"),
        (
            lambda r, p: p.rows(r.late, 16, out=r.late, gather=True, logits=True),
            "source (buffer 2) holds the rows with",
        ),
        (lambda r, p: p.rows(r.y, 64, out=r.y, hadamard=48), "block 48 must be a power of two that divides 64"),
        (lambda r, p: p.rows(r.y, 64, act=r.act, weight=_native.PackedLinear("f32", 2, 64)), "act (buffer 3) has rows"),
        (lambda r, p: p.linear(r.act, _native.PackedLinear("f32", 1 << 18, 16), r.x), "needs 1048576"),
        (lambda r, p: p.linear(r.act, _native.PackedLinear("f32", 16, 64), r.x), "act (buffer 3) has rows of 64 bytes"),
        (lambda r, p: p.linear(r.act, r.weight, r.y, logits=True), "act (buffer 3) holds all tokens"),
        (lambda r, p: p.linear(r.act, r.weight, r.y, gate="relu"), "no gate 'relu'; there are silu"),
        (
            lambda r, p: [
                act := p.activation(matrix("int8")),
                p.rows(r.x, 16, act=act, weight=matrix("int8")),
                p.linear(act, matrix("f32"), r.x),
            ],
            "act (buffer 4) holds rows prepared as i8_token",
        ),
        (lambda r, p: p.add(r.y, r.x, 32, 1.0), "y (buffer 0) has rows of 64"),
        (lambda r, p: p.scale_softcap(0, 1.0, 0.0), "over 0 columns"),
        (
            lambda r, p: p.rope(r.x, layer(), cache(1), 0, None),
            "qkv (buffer 0) has rows of 64 bytes, but the instruction",
        ),
        (lambda r, p: p.rope(r.y, layer(), cache(1), 64, None), "group is 64; it must be from 0 to 63"),
        (lambda r, p: p.rope(r.y, layer(), cache(1, 32), 0, None), "cache is [1, 4096], expected [1, 2048]"),
        (
            lambda r, p: p.rope(r.y, layer(), cache(1), 0, torch.zeros(8, 1, 8)),
            "is [8, 1, 8]; it must be [positions, 2",
        ),
        (lambda r, p: p.rope(r.y, layer(), cache(1), 0, torch.zeros(8, 2, 9)), "at most head_dim, which is 16"),
        (lambda r, p: p.attention(r.x, r.late, layer(), cache(1), 0), "out (buffer 2) holds the rows with logits"),
        (
            lambda r, p: [p.rope(r.y, layer(size), cache(1, size), 0, None) for size in (16, 128)],
            "blocks of 16 tokens and one of 128; layers of different block sizes go into different groups",
        ),
        (lambda r, p: p.moe(r.x, r.act, r.y, [None], [r.weight], top_k=1, renormalize=True), "entry 0 of a list of"),
        (
            lambda r, p: p.moe(r.x, r.act, r.x, *experts(17), top_k=1, renormalize=True),
            "router (buffer 0) has rows of 64",
        ),
        (lambda r, p: p.moe(r.x, r.act, r.x, *experts(2), top_k=3, renormalize=True), "top_k is 3"),
        (
            lambda r, p: p.moe(r.x, r.act, r.x, *experts(2), top_k=1, renormalize=True, down_hadamard=32),
            "block 32 must be a power of two that divides 16",
        ),
    ],
)
def test_an_instruction_must_fit_its_buffers(record: Record, message: str) -> None:
    recording = Recording()
    with pytest.raises(ValueError, match=re.escape(message)):
        record(recording, recording.program)


def experts(count: int, scale: float = 1.0) -> tuple[list[_native.PackedLinear], list[_native.PackedLinear]]:
    """Of rows of 16, and as wide inside: multiples of the identity."""
    gate_up = [_native.PackedLinear("f32", 32, 16, gated=True) for _ in range(count)]
    down = [_native.PackedLinear("f32", 16, 16) for _ in range(count)]
    for at in range(count):
        gate_up[at].write_floats(0, scale * torch.eye(16).repeat(2, 1))
        down[at].write_floats(0, scale * torch.eye(16))
    return gate_up, down


def integers(kind: str, rows: int, *, gated: bool = False) -> _native.PackedLinear:
    """The largest integers there are, and the smallest: [rows, 64]."""
    columns = torch.arange(rows) % 2
    if kind == "int8":
        packed = _native.PackedLinear("int8", rows, 64, gated=gated)
        q = (127 - 255 * columns).to(torch.int8)[:, None].expand(rows, 64)
        packed.write_int8(0, q.contiguous(), torch.full((rows,), 1e-4))
        return packed
    packed = _native.PackedLinear("group8", rows, 64, gated=gated, group=32)
    q = (255 * (1 - columns)).to(torch.uint8)[:, None].expand(rows, 64)
    packed.write_groups(0, q.contiguous(), torch.full((rows, 2), 2.0**-13), None, 128)
    return packed


@pytest.mark.parametrize("kind", ["int8", "group8"])
@pytest.mark.parametrize("through", ["linear", "moe"])
def test_a_program_rounds_rows_as_its_products_want_them(isa: str, kind: str, through: str) -> None:
    """Equal neighbours times the largest weights: what would not fit 16 bits rounded otherwise."""
    program = _native.Program(4, 4)
    first, down = integers(kind, 128, gated=True), integers(kind, 64)
    x = torch.arange(8.0)[:, None].expand(8, 64).contiguous()
    program.embed(embedding(8, 64), 1.0, stream := program.floats(64))
    program.rows(stream, 64, act=(act := program.activation(first)), weight=first)
    out = program.floats(64)
    if through == "moe":
        program.moe(stream, act, out, [first], [down], top_k=1, renormalize=True)
    else:
        program.linear(act, first, inner := program.floats(64))
        program.rows(inner, 64, act=(down_act := program.activation(down)), weight=down)
        program.linear(down_act, down, out)
    program.rows(out, 64, gather=True, logits=True, result=True)
    program.finish()
    step = Step(4, 64)
    got = step.run(program, token_ids=torch.tensor([7, 1, 0, 3], dtype=torch.int32))
    inside, want = torch.empty(4, 64), torch.empty(4, 64)
    _native.linear(x[[7, 1, 0, 3]].contiguous(), first, inside)
    _native.linear(inside, down, want)
    assert torch.equal(got, want)
    assert want.abs().amax() > 0


def test_a_program_keeps_its_experts_however_the_list_changes() -> None:
    program = _native.Program(4, 4)
    gate_up, down = experts(2)
    program.embed(embedding(), 1.0, x := program.floats(16))
    program.rows(x, 16, act=(act := program.activation(gate_up[0])), weight=gate_up[0])
    program.moe(x, act, out := program.floats(16), gate_up, down, top_k=2, renormalize=True)
    program.rows(out, 16, gather=True, logits=True, result=True)
    program.finish()
    gate_up.clear()
    down.clear()
    others = [experts(2, scale=-7.0) for _ in range(20)]  # where the memory of the others was
    want = torch.nn.functional.silu(torch.tensor(1.0)) * torch.tensor([[0.0], [1.0]]).expand(2, 16)
    torch.testing.assert_close(Step().run(program), want)
    del others


@pytest.mark.parametrize("writes", ["result", "logits", "softcap"])
def test_logits_must_be_as_wide_as_what_a_step_writes(writes: str) -> None:
    head = embedding(100)
    program = _native.Program(4, 4)
    program.embed(embedding(), 1.0, x := program.floats(128))
    act = program.activation(head, logits=True)
    if writes == "logits":
        program.rows(x, 16, act=act, weight=head, gather=True, logits=True)
        program.linear(act, head, -1, logits=True)
    elif writes == "softcap":
        program.scale_softcap(100, 1.0, 0.0)
    else:
        program.rows(x, 100, gather=True, logits=True, result=True)
    program.finish()
    step = Step()
    for logits in (torch.zeros(2, 99), torch.zeros(1, 100)):
        with pytest.raises(ValueError, match=re.escape("but the step writes [2, 100]")):
            step.run(program, logits=logits)
    with pytest.raises(ValueError, match="the rows of logits overlap"):
        step.run(program, logits=torch.zeros(200).as_strided((2, 100), (99, 1)))
    step.run(program, logits=torch.zeros(2, 100))


def two_layers(num_blocks: tuple[int, int], groups: tuple[int, int], block_size: tuple[int, int]) -> _native.Program:
    """Each writes and attends to a cache of its own."""
    program = _native.Program(4, 4)
    program.embed(embedding(), 1.0, program.floats(16))
    qkv, out = program.floats(48), program.floats(16)
    for blocks, group, size in zip(num_blocks, groups, block_size, strict=True):
        program.rope(qkv, layer(size), own := cache(blocks, size), group, None)
        program.attention(qkv, out, layer(size), own, group)
    program.finish()
    return program


@pytest.mark.parametrize("num_blocks", [(1, 8), (8, 1)])
def test_a_group_s_smallest_cache_bounds_its_blocks(num_blocks: tuple[int, int]) -> None:
    program = two_layers(num_blocks, (0, 0), (16, 16))
    step = Step(groups=1)
    step.run(program)
    with pytest.raises(ValueError, match="slot 16 lies past the smallest cache of group 0, which has 16"):
        step.run(program, slot_mapping=[torch.tensor([0, 16], dtype=torch.int32)])
    with pytest.raises(ValueError, match="names block 1, a block that does not exist; there are 1"):
        step.run(program, block_tables=[torch.tensor([[1]], dtype=torch.int32)])


@pytest.mark.parametrize("groups", [(0, 1), (1, 0)])
def test_each_group_has_blocks_of_its_own_size(groups: tuple[int, int]) -> None:
    program = two_layers((1, 1), groups, (16, 128))
    small = groups[0]
    step = Step(groups=2)
    slots = [torch.tensor([0, 15 if group == small else 127], dtype=torch.int32) for group in range(2)]
    step.run(program, slot_mapping=slots)
    slots[small][1] = 80
    with pytest.raises(ValueError, match=f"slot 80 lies past the smallest cache of group {small}, which has 16"):
        step.run(program, slot_mapping=slots)


def test_an_instruction_that_comes_too_late_changes_nothing() -> None:
    program = two_layers((8, 8), (0, 0), (16, 16))
    step = Step(groups=1)
    step.run(program)
    for late in (
        lambda: program.attention(1, 2, layer(), cache(1), 1),
        lambda: program.rope(1, layer(), cache(1), 0, torch.zeros(1, 2, 8)),
        lambda: program.embed(embedding(1), 1.0, 0),
        lambda: program.positions(torch.zeros(1, 16), 0),
        lambda: program.scale_softcap(1 << 20, 1.0, 0.0),
        lambda: program.floats(16),
    ):
        with pytest.raises(RuntimeError, match="the program is finished"):
            late()
    step.run(program, slot_mapping=[torch.tensor([100, 127], dtype=torch.int32)])


def test_a_program_that_is_not_finished_is_not_profiled() -> None:
    """It would count the instructions that there are so far."""
    with pytest.raises(RuntimeError, match="finish"):
        _native.Program(4, 4).set_profiling(True)

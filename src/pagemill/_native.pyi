"""The native CPU kernels (csrc/). Arrays are torch CPU tensors or numpy arrays of just the type that is named.

They are contiguous: all of them along their last axis, and whole but for ``x`` and ``out`` of linear(), hadamard(),
what is written to a PackedLinear, and logits, whose rows may lie apart. Nothing is converted: a copy would take what
is written with it.

ValueError for what does not fit, an array of another type or layout included, with the value and the limit. TypeError
for too few or too many arguments, and for one that is of another kind altogether where no array is asked for.
RuntimeError for a call at the wrong time: an instruction for a program that is finished, a run of one that is not.
Every call that computes releases the GIL.
"""

from typing import Any, Literal

import numpy

Array = Any
"""torch.Tensor on the CPU, or numpy.ndarray."""

# ------------------------------------------------------------------------------------- instruction sets, threads

def isa() -> str:
    """The instruction set in force: the strongest of available_isas() until set_isa() is called."""

def available_isas() -> list[str]:
    """What this build and this CPU have, weakest first, of portable, avx2, avxvnni, avx512, avx512bf16."""

def set_isa(name: str) -> None:
    """Choose another one. Packed weights stay valid; a recorded program must be recorded again."""

def num_threads() -> int:
    """Threads that a kernel runs on, the caller included."""

def set_num_threads(n: int) -> None:
    """1 to 256. Results do not depend on it."""

def usable_cores() -> int:
    """Physical cores that affinity and the cgroup's CPU quota leave to this process: num_threads() at the start."""

def measure_ceiling(kind: Literal["int8", "bf16", "f32", "read"], seconds: float = 0.3, size: int = 1 << 28) -> float:
    """The most this machine does on num_threads() threads under the instruction set in force.

    Operations a second (multiplications and additions) of int8 or bfloat16 dot products or float32 fused
    multiply-adds, 0.0 where the set has none; for "read" bytes a second from ``size`` bytes of memory. Best of several
    tries.
    """

def team_selftest(rounds: int, tasks: int) -> int:
    """Tasks that the thread pool ran not exactly once: 0."""

# ------------------------------------------------------------------------------------- matrix products

class PackedLinear:
    """A weight matrix W [rows, k], packed once for all instruction sets and written as it streams in.

    kind      w as stored                            x as multiplied
    f32       float32                                float32
    bf16      bfloat16                               bfloat16, or float32 where the CPU has no bf16 dot product
    int8      scale[row] * int8                      int8, one scale per token; see quantize_token
    group4    4-bit integers, scale (and minimum)    int8, one scale per 32 values
              per ``group`` of 32, 64, 128 ...
    group8    8-bit integers; group may be 16, too   int8, one scale per 32 values; see quantize_token

    ``gated``: rows [0, rows / 2) are the gate, the rest the up projection; linear() stores act(gate) * up. ``bits``: of
    the largest q of a group8 matrix with minima; no matter for others.
    """

    def __init__(
        self,
        kind: Literal["f32", "bf16", "int8", "group4", "group8"],
        rows: int,
        k: int,
        *,
        gated: bool = False,
        bias: bool = False,
        group: int = 0,
        has_min: bool = False,
        bits: int = 8,
    ) -> None: ...
    def write_floats(self, first: int, rows: Array) -> None:
        """Rows [n, k] float32, float16 or bfloat16 into rows ``first`` and on of an f32, bf16 or int8 matrix.

        int8: scale = absmax / 127 of each row, rounded to nearest even.
        """

    def write_int8(self, first: int, q: Array, scale: Array) -> None:
        """q [n, k] int8 with scale [n] float32."""

    def write_groups(self, first: int, q: Array, scale: Array, minimum: Array | None = None, zero: int = 8) -> None:
        """q [n, k] uint8, one value a byte; scale and minimum [n, ceil(k / group)] float32. Each row once.

        w = scale * q + minimum, or scale * (q - zero) without minima: zero is 8 for group4; for group8 q - zero must
        fit int8. Scales are kept as float16 times a power of two per row: float16 scales exactly, others to 11 bits.
        """

    def write_bias(self, first: int, bias: Array) -> None:
        """bias [n] float32."""

    def unpack(self, out: Array, rows: Array | None = None) -> None:
        """The weights as stored into out [rows, k] float32; or only the source rows ``rows`` [n] int32."""

    @property
    def kind(self) -> str: ...
    @property
    def n(self) -> int:
        """Outputs: rows, or rows / 2 when gated."""

    @property
    def k(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def group(self) -> int: ...
    @property
    def has_min(self) -> bool: ...
    @property
    def activation_kind(
        self,
    ) -> Literal["f32", "bf16", "i8_token", "i8_group", "i8_token_pairs", "i8_group_pairs"]:
        """Which form of rows it is multiplied with under the instruction set in force."""

    @property
    def nbytes(self) -> int: ...

def linear(
    x: Array,
    w: PackedLinear,
    out: Array,
    *,
    rows: Array | None = None,
    accumulate: bool = False,
    gate: Literal["silu", "gelu_tanh"] = "silu",
) -> None:
    """out [M, n] = x [M, k] · Wᵀ + bias, float32; with ``rows`` [M] int32, of those rows of x only.

    ``accumulate`` adds into out, the residual stream. A row of out depends on its row of x alone, bit for bit.
    """

def time_linear(copies: list[PackedLinear], rows: int, repeats: int, prepare: bool = False) -> float:
    """Seconds of one product with ``rows`` rows, mean over the copies of each one's quickest time. For benchmarks."""

def quantize_token(x: Array, q: Array, scale: Array, total: Array, pairs: bool = False) -> None:
    """x [M, k] float32 -> q [M, k] int8 = round(x * 127 / absmax), scale [M, 1] float32, sum of q [M, 1] int32.

    k is at most 65536. ``pairs``: absmax is over the sums x[2 i] + x[2 i + 1], too, so that no sum of q exceeds 128
    in magnitude: what a CPU with AVX2 and no dot products of bytes multiplies int8 and group8 matrices with, except
    group8 matrices of fewer than 8 ``bits``.
    """

def quantize_group(x: Array, q: Array, scale: Array, total: Array, pairs: bool = False) -> None:
    """The same per 32 values: scale and sum [M, ceil(k / 32)]."""

def hadamard(x: Array, block: int) -> None:
    """x [M, k] float32 in place: each ``block`` of values (a power of 2) times the orthonormal Hadamard matrix."""

# ------------------------------------------------------------------------------------- attention and row ops

def kv_block_bytes(kv_type: int, block_size: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of one block of one layer's KV cache. ``kv_type``: 0 bfloat16, 1 float32, 2 int8.

    ``block_size``: a multiple of 16. The layout inside is the kernels' own (csrc/ops/attention.h).
    """

def allocate_bytes(rows: int, columns: int) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
    """Zeroed uint8 [rows, columns] on huge pages; untouched pages take no memory."""

class PageWarmer:
    """Backs the first ``num_bytes`` of each array of allocate_bytes with memory, in time that nobody else wants.

    It holds on to the arrays; it stops when it is done or dropped.
    """

    def __init__(self, arrays: list[Array], num_bytes: int) -> None: ...

def attention(
    query: Array,
    cache: Array,
    query_start: Array,
    context_lens: Array,
    block_tables: Array,
    out: Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    kv_type: int = 0,
    causal: bool = True,
) -> None:
    """Attention of each request's last queries over its cached keys: those up to the query, or (not causal) all.

    query float32 [N, >= num_heads * head_dim], cache uint8 [num_blocks, kv_block_bytes()], query_start int32 [R + 1],
    context_lens int32 [R] (new tokens included), block_tables int32 [R, max_blocks] (entries behind the window are not
    read), out float32 [N, num_heads * head_dim]. ``window`` positions are seen, the query's own included; 0 sees all.
    """

def rope_and_cache(
    qkv: Array,
    cache: Array,
    positions: Array,
    slots: Array,
    table: Array | None,
    *,
    interleaved: bool = False,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 1e-6,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    kv_type: int = 0,
) -> None:
    """Norm and rotate queries and keys in place, and write keys and values to the cache.

    qkv float32 [N, (num_heads + 2 num_kv_heads) head_dim]; slots int32 [N]: block_id * block_size + offset, -1 to skip;
    table float32 [max_positions, 2, rotary_dim / 2]: cosines, sines.
    """

def rms_norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight; float32 [N, K], [K], [N, K]."""

def layer_norm(x: Array, weight: Array, bias: Array, eps: float, out: Array) -> None:
    """out = (x - mean) / sqrt(variance + eps) * weight + bias; float32 [N, K], [K], [K], [N, K]."""

def activate(x: Array, name: Literal["gelu", "tanh"]) -> None:
    """x = activation(x) in place; gelu is the exact one, x / 2 (1 + erf(x / sqrt(2)))."""

def scale_softcap(x: Array, scale: float, cap: float = 0.0) -> None:
    """x *= scale, then cap * tanh(x / cap) where cap > 0; in place."""

# ------------------------------------------------------------------------------------- the recorded step

class AttentionLayer:
    """The constants of one layer's attention."""

    def __init__(
        self,
        *,
        kv_type: int,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        causal: bool = True,
    ) -> None: ...
    @property
    def block_bytes(self) -> int:
        """kv_block_bytes() of this layer."""

class Program:
    """Instructions over buffers, appended once and run once a step. Buffers are numbers; -1 is none.

    ``logits``: over the rows with logits alone instead of all tokens. ValueError for an instruction whose buffers hold
    other rows than it runs over, or shorter ones than it needs; it leaves the program as it was. Caches, tables and
    weights are kept alive as long as the program.
    """

    def __init__(self, max_tokens: int, max_logits: int, tile_rows: int = 256) -> None: ...
    def floats(self, columns: int, logits: bool = False) -> int:
        """A new buffer of float32 rows."""

    def activation(self, weight: PackedLinear, logits: bool = False) -> int:
        """A new buffer of rows in the form that ``weight`` is multiplied with."""

    def embed(self, table: PackedLinear, scale: float, out: int) -> None:
        """Rows of the table for the step's token ids."""

    def rows(
        self,
        source: int,
        columns: int,
        *,
        norm: Array | None = None,
        eps: float = 0.0,
        hadamard: int = 0,
        out: int = -1,
        act: int = -1,
        weight: PackedLinear | None = None,
        gather: bool = False,
        logits: bool = False,
        result: bool = False,
    ) -> None:
        """Each row: gather (its token's) -> norm -> Hadamard -> ``out`` floats, ``act`` for ``weight``.

        ``result``: the floats are the step's result, in the place of logits.
        """

    def positions(self, table: Array, out: int) -> None:
        """Rows of ``table`` [P, columns] float32 for the step's positions."""

    def layer_norm(self, source: int, out: int, weight: Array, bias: Array, eps: float, logits: bool = False) -> None:
        """Each row of ``source``, over as many columns as the weight has, into ``out`` (which may be the source)."""

    def activate(self, buffer: int, columns: int, name: str, logits: bool = False) -> None:
        """gelu or tanh, in place."""

    def linear(
        self,
        act: int,
        weight: PackedLinear,
        out: int,
        *,
        accumulate: bool = False,
        gate: str = "silu",
        logits: bool = False,
        find_best: bool = False,
    ) -> None:
        """A matrix product; ``out`` -1 is the step's logits, whose best are found on the way with ``find_best``."""

    def add(self, out: int, y: int, columns: int, scale: float, logits: bool = False) -> None:
        """out += scale * y."""

    def rope(
        self,
        qkv: int,
        layer: AttentionLayer,
        cache: Array,
        group: int,
        table: Array | None,
        *,
        interleaved: bool = False,
        q_norm: Array | None = None,
        k_norm: Array | None = None,
        eps: float = 0.0,
    ) -> None:
        """rope_and_cache() in place."""

    def attention(self, query: int, out: int, layer: AttentionLayer, cache: Array, group: int) -> None:
        """attention(); the query rows may be those of the fused projection.

        Layers of one group have blocks of one size, and a step may name those of the smallest cache.
        """

    def scale_softcap(self, columns: int, scale: float, softcap: float) -> None:
        """Of the logits; finds the best of each row afterwards."""

    def moe(
        self,
        router: int,
        act: int,
        out: int,
        gate_up: list[PackedLinear],
        down: list[PackedLinear],
        *,
        top_k: int,
        renormalize: bool,
        down_hadamard: int = 0,
        gate: str = "silu",
        logits: bool = False,
    ) -> None:
        """A mixture of experts over router scores and prepared rows."""

    def finish(self) -> None:
        """Lay out the memory; nothing can be appended afterwards."""

    def run(
        self,
        token_ids: Array,
        positions: Array,
        query_start: Array,
        context_lens: Array,
        slot_mapping: list[Array],
        block_tables: list[Array],
        logits_rows: Array,
        logits: Array,
        logits_kept: Array,
        best: Array,
        highest: Array,
        finite: Array,
    ) -> None:
        """One step; arrays as in kernels.ops.StepInputs, logits float32 [>= L, >= V]. ValueError for any wild index.

        If the program ends in logits: best int64 [L], highest float32 [L] and finite bool [L] as in row_extremes().
        Where logits_kept bool [L] is false, the row of logits may stay as it was.
        """

    def set_profiling(self, on: bool) -> None:
        """While on, run() adds up what each instruction takes; turning it on sets all to 0."""

    def timings(self) -> list[tuple[str, float]]:
        """Name and seconds of each instruction, waiting for other threads included; empty unless profiling."""

    @property
    def arena_bytes(self) -> int:
        """Memory of all buffers."""

    @property
    def num_instructions(self) -> int:
        """Length."""

# ------------------------------------------------------------------------------------- sampling

def row_extremes(logits: Array, best: Array, highest: Array, finite: Array) -> None:
    """Of each row of logits [R, V] float32: the lowest id of the highest logit, that logit, whether all are finite.

    best [R] int64, highest [R] float32, finite [R] bool.
    """

def best_allowed(logits: Array, index: Array, mask: Array, best: Array, highest: Array) -> None:
    """Best tokens as of :func:`row_extremes` in the rows ``index`` [n] int64, among those that mask allows.

    mask [n, ceil(V / 32)] int32 as in :func:`forbid_tokens`; highest -inf where nothing is allowed.
    """

def row_logprobs(
    logits: Array, index: Array, chosen: Array, value: Array, rank: Array, best: Array, best_value: Array
) -> None:
    """Log probabilities in the finite rows ``index`` [n] int64 of logits [R, V] float32.

    Of the tokens ``chosen`` [n] int64 into value [n] float32 and rank [n] int64 (1: the best; equals share one); of the
    m best tokens, equals by ascending id, into best [n, m] int64 and best_value [n, m] float32.
    """

def forbid_tokens(logits: Array, index: Array, mask: Array) -> None:
    """In the rows ``index`` [n] int64 of logits: -inf in place where the token's bit in mask is 0.

    mask [n, ceil(V / 32)] int32, lowest bit first.
    """

def draw_rows(
    logits: Array,
    index: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seed: Array,
    position: Array,
    out: Array,
) -> None:
    """A token for each of the rows ``index`` [n] int64 of logits [R, V] float32 into out [n] int64.

    temperature (2^-126 or more), top_p (0 or more) and min_p (0 to 1) [n] float32, top_k [n] int32 (0: off), seed [n]
    uint64, position [n] int64. The draw is the one that pagemill/sampling/noise.py defines.
    """

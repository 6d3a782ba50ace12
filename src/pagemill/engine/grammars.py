"""The engine's half of structured output: which tokens each constrained row may take next.

Owns one matcher per constrained row that is running, a side table beside the scheduler's requests. A matcher is a
function of the grammar and the output tokens alone: it is dropped with its row (end, abort, preemption) and built anew
when the request resumes. Grammars are built in threads of their own, once per text; a request waits outside the queue
until its grammar is there. Must not sample or know text: the sampler asks.

A mask depends on the tokens that were accepted before its step, so it is computed while the forward pass runs, by
threads on the CPUs that the pass leaves free. Where it leaves none they would take a core from the kernels' team, and
the whole team would wait at the next barrier: there the masks come after the pass, on all cores, and only for rows
whose token they decide, or whose last mask is long ago. A greedy row whose best token of all is allowed takes that one.
A text that must follow is looked for once, and needs neither masks nor tries until it ends.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagemill.config import EngineConfig
from pagemill.core.messages import EngineOutput, EngineRequest, NewRow, SchedulerOutput, ending_token_ids
from pagemill.engine.grammar_check import limits, one_line, told
from pagemill.errors import RequestError
from pagemill.model_config import ModelConfig
from pagemill.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["TokenGrammars"]

Rows = NDArray[np.int64]

BUILD_LIMIT_S = 10.0
"""Processor time of a builder. The last resort: the front has checked the grammar within a tenth of it; the first build
also opens the tokenizer."""
MAX_KEPT = 256
"""Grammars kept for the next request with the same text."""
WAIT_S = 0.005
MAX_THREADS = 8
ROWS_OF_A_THREAD = 4
"""Waking a thread costs about as much as so many masks."""
MASK_EVERY = 16
"""Tokens of a row. What a matcher's lexer may build is counted from mask to mask: without one a long text runs out."""


@dataclass(slots=True, eq=False)
class _Row:
    """A constrained row of the worker."""

    grammar: str
    matcher: LLMatcher
    pending: int
    """Tokens to compute before one is sampled."""
    num_output_tokens: int
    min_tokens: int
    ending: frozenset[int]
    mask: NDArray[np.int32]  # [ceil(V / 32)]
    error: str | None = None
    """Why no token can be allowed any more."""
    forced: deque[int] = field(default_factory=deque)
    """Tokens that must follow, as far as they are known: found once for a whole run of them, which takes a time that
    grows with its length."""
    num_unmasked: int = MASK_EVERY
    """Tokens since the last mask, but for those that had to follow. A row begins with a mask: matchers of one grammar
    share a lexer, which others may have left with nothing to build from."""

    def find_forced(self) -> bool:
        """Whether one certain token must follow."""
        if not self.forced:
            self.forced.extend(self.matcher.compute_ff_tokens())
        return bool(self.forced)

    def write_forced(self) -> bool:
        """Write the mask if it is known to have one token; whether it was."""
        if not self.forced:
            return False
        self.mask.fill(0)
        self.mask.view(np.uint32)[self.forced[0] // 32] = 1 << self.forced[0] % 32
        return True

    def compute_mask(self) -> None:
        """Which tokens may follow."""
        self.matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        self.num_unmasked = 0

    def accept(self, token_ids: list[int]) -> None:
        """Go on with tokens."""
        self.matcher.consume_tokens(token_ids)
        for token in token_ids:
            if not self.forced:
                self.num_unmasked += 1
            elif self.forced.popleft() != token:
                self.forced.clear()

    def follow(self, token_ids: list[int]) -> None:
        """Go on with what was accepted before a preemption."""
        for token in token_ids:
            if self.num_unmasked >= MASK_EVERY and not self.find_forced():
                self.compute_mask()
            self.accept([token])


class _Build:
    """A grammar, built in a thread that does not keep the process alive."""

    def __init__(self, work: Callable[[], LLMatcher]) -> None:
        self.future: Future[LLMatcher] = Future()
        self._clock_id: int | None = None
        threading.Thread(target=self._run, args=(work,), name="pagemill-grammar", daemon=True).start()

    def _run(self, work: Callable[[], LLMatcher]) -> None:
        self._clock_id = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self.future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (a panic of the Rust library is no Exception)
            self.future.set_exception(error if isinstance(error, Exception) else RequestError(one_line(error)))

    def cpu_s(self) -> float:
        """Processor time that the thread has used; waiting for a busy machine is not counted."""
        try:
            return 0.0 if self._clock_id is None else time.clock_gettime(self._clock_id)
        except OSError:  # the thread has ended
            return 0.0


class _Filling:
    """The masks of some rows, while they are computed."""

    def __init__(self, rows: list[_Row], helpers: ThreadPoolExecutor, num_helpers: int) -> None:
        """Lets ``num_helpers`` threads take one mask after another.

        llguidance's own executor took 1.2 ms for 32 rows on two cores where this takes 0.7.
        """
        self._left = iter(rows)
        """Taking the next is one step of the interpreter, so no two threads get the same."""
        self._helping = [helpers.submit(self._work) for _ in range(num_helpers)]

    def finish(self) -> None:
        """Until all masks are there; takes what is left itself."""
        self._work()
        for helper in self._helping:
            helper.result()

    def _work(self) -> None:
        for row in self._left:
            row.compute_mask()


@dataclass(slots=True, eq=False)
class _StepConstraints:
    """The sampler's constraints of one step (sampling/constraints.py); masks are computed for rows that need one."""

    due: dict[int, _Row]
    """By row of the plan, or of what :meth:`of` made."""
    helpers: ThreadPoolExecutor
    num_threads: int
    """That compute masks after the forward pass."""
    begun: _Filling | None = None
    """All masks of the step, begun under the forward pass."""

    def of(self, index: Rows) -> _StepConstraints:
        """Row i is row ``index[i]`` of this."""
        due = {i: self.due[row] for i, row in enumerate(index.tolist()) if row in self.due}
        return dataclasses.replace(self, due=due)

    def rows(self) -> Rows:
        """Those that are constrained, ascending."""
        return np.fromiter(self.due, np.int64, len(self.due))

    def allow(self, at: Rows, tokens: Rows) -> NDArray[np.bool_]:
        """Trying one token takes a twentieth of the time that a mask takes."""
        if self.begun is not None:
            self.begun.finish()
        pairs = zip(at.tolist(), tokens.tolist(), strict=True)
        return np.array([self._allows(self.due[i], token) for i, token in pairs], np.bool_)

    def bitmask(self, at: Rows) -> NDArray[np.int32]:
        """All zeros where a grammar cannot go on."""
        rows = [self.due[i] for i in at.tolist()]
        filling = self.begun
        if filling is None:
            unknown = [row for row in rows if not row.write_forced()]
            num_helpers = max(0, min(self.num_threads, len(unknown) // ROWS_OF_A_THREAD) - 1)
            filling = _Filling(unknown, self.helpers, num_helpers)
        filling.finish()
        found = np.stack([row.mask for row in rows])
        for mask, row in zip(found, rows, strict=True):
            if row.matcher.is_error():
                row.error = told(row.matcher.get_error())
                mask[:] = 0
                continue
            if not row.forced and np.count_nonzero(mask) == 1:
                row.find_forced()
            if row.num_output_tokens < row.min_tokens and not row.matcher.is_stopped():
                _forbid_where_others_are_left(mask, row.ending)
        return found

    def _allows(self, row: _Row, token: int) -> bool:
        if row.num_output_tokens < row.min_tokens and token in row.ending:
            return False
        if self.begun is not None:
            return not row.matcher.is_error() and bool(row.mask[token // 32] >> token % 32 & 1)
        if row.matcher.is_stopped():  # the end, or an error
            return False
        if row.find_forced():  # of a text that must follow, a mask has one token
            return token == row.forced[0]
        return row.num_unmasked < MASK_EVERY and bool(row.matcher.validate_tokens([token]) == 1)


class TokenGrammars:
    """:class:`~pagemill.engine.core.Grammars` by llguidance."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, *, num_cpus: int, num_free_cpus: int) -> None:
        """``num_free_cpus``: those of ``num_cpus`` that a forward pass leaves idle."""
        self._config = config
        self._vocab_size = model_config.vocab_size
        self._width = (model_config.vocab_size + 31) // 32
        self._eos_token_ids = model_config.eos_token_ids
        self._builds: OrderedDict[str, _Build] = OrderedDict()
        self._rows: dict[str, _Row] = {}
        self._lock = threading.Lock()
        self._opened: LLTokenizer | None = None
        self._step: _StepConstraints | None = None
        self._num_threads_under = min(num_free_cpus, MAX_THREADS)
        self._num_threads_after = min(num_cpus, MAX_THREADS)
        self._helpers = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="pagemill-mask")

    def ready(self, request: EngineRequest) -> bool:
        """Whether the request's grammar is built; starts that where nobody has."""
        grammar = _grammar(request.params.structured_outputs)
        build = self._build(grammar)
        if not build.future.done():
            if build.cpu_s() > BUILD_LIMIT_S:
                raise RequestError(
                    f"the grammar took more than {BUILD_LIMIT_S:g} s of processor time to build; make it simpler",
                    param="structured_outputs",
                )
            return False
        if build.future.exception() is not None:
            del self._builds[grammar]
        build.future.result()
        return True

    def wait(self) -> None:
        """Until a grammar is built, at most a few milliseconds."""
        wait([build.future for build in self._builds.values() if not build.future.done()], WAIT_S, "FIRST_COMPLETED")

    def begin(self, plan: SchedulerOutput) -> None:
        """Take in a step's rows and, where CPUs are free, start on their masks."""
        self._step = None
        if self._rows:
            for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
                self._rows.pop(request_id, None)
        for new in plan.new_rows:
            if new.params.structured_outputs is not None:
                self._rows[new.request_id] = self._row(new, new.params.structured_outputs)
        if not self._rows:
            return
        due: dict[int, _Row] = {}
        for index, (request_id, count) in enumerate(zip(plan.request_ids, plan.num_new_tokens, strict=True)):
            row = self._rows.get(request_id)
            if row is not None:
                row.pending -= count
                if row.pending == 0:
                    due[index] = row
        if due:
            self._step = _StepConstraints(due, self._helpers, self._num_threads_after)
            if self._num_threads_under:
                unknown = [row for row in due.values() if not row.write_forced()]
                num_helpers = max(1, min(self._num_threads_under, len(unknown) // ROWS_OF_A_THREAD))
                self._step.begun = _Filling(unknown, self._helpers, num_helpers)

    def constraints(self) -> _StepConstraints | None:
        """What the plan's rows may take; None where no row that gets a token is constrained."""
        step, self._step = self._step, None
        return step

    def accept(self, outputs: list[EngineOutput]) -> None:
        """Advance the matchers; say of a row that had no token left why."""
        if not self._rows:
            return
        for output in outputs:
            row = self._rows.get(output.request_id)
            if row is None:
                continue
            if output.finish_reason is not None:
                if row.error is not None:
                    # Its lexer may have come to its limit, and copies share it: the next request has one of its own.
                    self._builds.pop(row.grammar, None)
                if output.error is not None and row.error is not None:
                    output.error = f"structured_outputs: the grammar cannot be followed any further: {row.error}"
                    output.error_status, output.error_param = RequestError.status, "structured_outputs"
                del self._rows[output.request_id]
            elif output.new_token_ids:
                row.accept(output.new_token_ids)
                row.pending += len(output.new_token_ids)
                row.num_output_tokens += len(output.new_token_ids)

    def _row(self, new: NewRow, structured: StructuredOutputsParams) -> _Row:
        """A matcher that has seen what the request had produced."""
        produced = new.token_ids[new.num_prompt_tokens :]
        grammar = _grammar(structured)
        row = _Row(
            grammar,
            self._build(grammar).future.result().deep_copy(),
            len(new.token_ids) - new.num_computed_tokens,
            len(produced),
            structured.min_tokens,
            ending_token_ids(new.params, new.eos_token_ids),
            np.empty(self._width, np.int32),
        )
        row.follow(produced)
        return row

    def _build(self, grammar: str) -> _Build:
        build = self._builds.get(grammar)
        if build is None:
            build = _Build(lambda: self._matcher(grammar))
            self._builds[grammar] = build
            if len(self._builds) > MAX_KEPT:
                self._forget_oldest()
        else:
            self._builds.move_to_end(grammar)
        return build

    def _forget_oldest(self) -> None:
        """Of what is built: requests wait for the rest."""
        for grammar, build in self._builds.items():
            if build.future.done():
                del self._builds[grammar]
                return

    def _matcher(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        with self._lock:  # many may come at once; the first opens the tokenizer
            tokenizer = self._opened = self._opened or self._open_tokenizer()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise RequestError(f"structured_outputs: {told(matcher.get_error())}", param="structured_outputs")
        return matcher

    def _open_tokenizer(self) -> LLTokenizer:
        """The model's vocabulary as bytes."""
        from llguidance import LLTokenizer, TokenizerWrapper

        from pagemill.models.checkpoint import open_checkpoint
        from pagemill.models.sources import resolve_source
        from pagemill.models.tokenizer import load_tokenizer

        checkpoint = open_checkpoint(resolve_source(self._config.model, revision=self._config.revision))
        try:
            tokenizer = load_tokenizer(checkpoint, self._config.tokenizer)
        finally:
            checkpoint.close()
        size = min(tokenizer.vocab_size, self._vocab_size)
        eos = sorted(index for index in {*tokenizer.eos_ids, *self._eos_token_ids} if index < size)
        wrapped = TokenizerWrapper(_Bytes(tokenizer, self._vocab_size, eos[0]))
        return LLTokenizer(wrapped, eos_token=eos)


class _Bytes:
    """A tokenizer in the shape that llguidance takes."""

    def __init__(self, tokenizer: Any, size: int, eos_id: int) -> None:
        """``size``: the model's, which masks have; ids that the tokenizer does not know have no bytes."""
        self._tokenizer = tokenizer
        self.eos_token_id = eos_id
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(index) for index in range(size)]
        self.special_token_ids = sorted({index for index in tokenizer.special_ids if index < size} | {eos_id})

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _grammar(structured: StructuredOutputsParams | None) -> str:
    assert structured is not None, "the request is constrained"
    assert structured.llguidance is not None, "the front compiles every grammar"
    return structured.llguidance


def _forbid_where_others_are_left(mask: NDArray[np.int32], tokens: frozenset[int]) -> None:
    """Clear bits of one row [ceil(V / 32)], unless nothing would be left."""
    fewer = mask.copy()
    bits = fewer.view(np.uint32)
    for token in tokens:
        if token // 32 < len(bits):
            bits[token // 32] &= np.uint32(~(1 << (token % 32)) & 0xFFFFFFFF)
    if fewer.any():
        mask[:] = fewer

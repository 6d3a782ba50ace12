"""What the engine answers, as the caller sees it: text, logprobs, several completions, deltas or the whole.

Owns the state of every open request on the front's side. Must not know sockets, asyncio or the model; it is called
with one step's outputs and says which requests need not be continued. A reader that is slow costs nothing: what it
has not taken yet is merged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum

from pagemill.core.messages import EngineOutput, TokenLogprobs
from pagemill.engine.caller import NOBODY, Caller
from pagemill.engine.detokenizer import Detokenizer, StopStrings, Vocabulary
from pagemill.engine.input import PreparedRequest
from pagemill.engine.metrics import Metrics, RequestStats
from pagemill.engine.record import RequestRecord
from pagemill.engine.wire import StepOutputs
from pagemill.errors import EngineError, NonFiniteLogitsError, PagemillError, RequestError
from pagemill.params import CompletionOutput, FinishReason, Logprob, RequestOutput

__all__ = ["CompletionState", "OutputKind", "OutputProcessor", "RequestState"]

logger = logging.getLogger("pagemill.engine")

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class OutputKind(StrEnum):
    """What each output of a stream holds."""

    DELTA = "delta"
    """What is new since the last one."""
    CUMULATIVE = "cumulative"
    """Everything so far."""
    FINAL = "final"
    """Everything, once, at the end."""


class CompletionState:
    """One of the completions of a request, while it grows."""

    __slots__ = (
        *("_deferred", "_detokenizer", "_logprobs", "_parts", "_stops", "_token_ids", "_vocabulary"),
        *("cumulative_logprob", "error", "finish_reason", "index", "last_token_s", "num_tokens", "params"),
        *("request", "request_id", "scheduled_s", "stop_reason", "stop_strings_by_id", "first_token_s"),
        *("kept_token_ids", "num_cached_tokens", "num_preemptions"),
    )

    def __init__(
        self, request: RequestState, request_id: str, index: int, vocabulary: Vocabulary, stop_by_id: dict[int, str]
    ) -> None:
        params = request.params
        self.request = request
        self.request_id = request_id
        """The engine's name for it."""
        self.index = index
        self.params = params
        self.stop_strings_by_id = stop_by_id
        """Stop strings that are one special token each."""
        self.num_tokens = 0
        self.num_cached_tokens = 0
        """Of the prompt, tokens that another request had computed."""
        self.num_preemptions = 0
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.scheduled_s = 0.0
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self._vocabulary = vocabulary
        at_start = all(token in vocabulary.special_ids for token in request.prompt_token_ids)
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=params.skip_special_tokens, at_start=at_start)
        self._stops = StopStrings(params.stop) if params.stop else None
        self._deferred = request.kind is OutputKind.FINAL and self._stops is None and params.logprobs is None
        """Text is made once, at the end."""
        self.kept_token_ids: list[int] | None = None
        """All tokens, where somebody wants to write them down."""
        self._token_ids: list[int] = []
        self._parts: list[str] = []
        self._logprobs: list[dict[int, Logprob]] = []

    def append(self, output: EngineOutput) -> None:
        """Take in what is new. May finish the completion by a stop string that the engine cannot see."""
        token_ids = output.new_token_ids
        self.num_tokens += len(token_ids)
        self._token_ids += token_ids
        if self.kept_token_ids is not None:
            self.kept_token_ids += token_ids
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_reason
            self.error = output.error
        if self._deferred:
            if output.finish_reason is not None:
                self._show(self._token_ids)
        elif output.new_logprobs and token_ids:
            last = len(token_ids) - 1
            for position, (token_id, found) in enumerate(zip(token_ids, output.new_logprobs, strict=True)):
                self._show([token_id], found, is_last=position == last)
        else:
            self._show(token_ids)

    def _show(self, token_ids: list[int], logprobs: TokenLogprobs | None = None, *, is_last: bool = True) -> None:
        """Turn tokens into text; at the end, everything that is left."""
        ending = is_last and self.finish_reason is not None
        shown, tail = token_ids, ""
        if ending and self.finish_reason is FinishReason.STOP and token_ids:
            shown, tail = self._without_stop_token(token_ids)
        text = self._detokenizer.feed(shown) if self.params.detokenize else ""
        if logprobs is not None:
            self._add_logprobs(token_ids[0], text if shown else "", logprobs)
        if ending:
            text += self._detokenizer.close()
        if self._stops is not None and self.num_tokens > self.params.min_tokens:
            text = self._stops.feed(text, include=self.params.include_stop_str_in_output)
            if self._stops.matched is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP, self._stops.matched
                tail = ""
            elif ending:
                text += self._stops.close()
        if text or tail:
            self._parts.append(text + tail)

    def _without_stop_token(self, token_ids: list[int]) -> tuple[list[int], str]:
        """The tokens that are text, and the stop token's text where the caller wants it."""
        stop_id = token_ids[-1]
        string = self.stop_strings_by_id.get(stop_id)
        if string is not None:
            self.stop_reason = string
        if not self.params.include_stop_str_in_output:
            return token_ids[:-1], ""
        if self.stop_reason is None:
            return token_ids, ""
        return token_ids[:-1], self._vocabulary.shown(stop_id)

    def _add_logprobs(self, token_id: int, text: str, found: TokenLogprobs) -> None:
        special = token_id in self._vocabulary.special_ids
        own_text = text if self.params.detokenize and not special and text else None
        if own_text is None and (special or self._vocabulary.text(token_id) is not None):
            own_text = self._vocabulary.shown(token_id)
        self._logprobs.append(_candidates(found, self._vocabulary, own_text or ""))
        self.cumulative_logprob += max(found[0][1], MIN_LOGPROB)

    def take(self, kind: OutputKind) -> CompletionOutput:
        """What the caller gets now."""
        text = "".join(self._parts)
        wants_logprobs = self.params.logprobs is not None
        taken = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self._token_ids,
            logprobs=self._logprobs if wants_logprobs else None,
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )
        if kind is OutputKind.DELTA:
            self._token_ids, self._parts, self._logprobs = [], [], []
        else:
            self._parts = [text]
            self._token_ids, self._logprobs = list(self._token_ids), list(self._logprobs)
        return taken


class RequestState:
    """A request that someone waits for: its completions, and what was not taken yet."""

    __slots__ = (
        *("_changed", "_pooled", "_prompt_logprobs", "_prompt_pieces", "arrival_s", "caller", "children", "error"),
        *("is_queued", "kind"),
        *("num_cached_tokens", "num_unfinished", "on_change", "params", "prompt", "prompt_token_ids", "request_id"),
        "vocabulary",
    )

    def __init__(
        self,
        prepared: PreparedRequest,
        *,
        kind: OutputKind,
        arrival_s: float,
        vocabulary: Vocabulary,
        on_change: Callable[[], None],
        caller: Caller = NOBODY,
    ) -> None:
        self.caller = caller
        self.request_id = prepared.request_id
        """The caller's name for it."""
        self.prompt = prepared.prompt
        self.prompt_token_ids = prepared.prompt_token_ids
        self.params = prepared.params
        self.kind = kind
        self.arrival_s = arrival_s
        self.vocabulary = vocabulary
        self.on_change = on_change
        """Called after each step that changed something."""
        self.num_cached_tokens = 0
        self.error: PagemillError | None = None
        """Why the whole request failed."""
        self.is_queued = True
        """No token of it is there yet, and it was not ended."""
        self.children = [
            CompletionState(self, request.request_id, index, vocabulary, prepared.stop_by_id)
            for index, request in enumerate(prepared.requests)
        ]
        self.num_unfinished = len(self.children)
        self._changed: dict[int, CompletionState] = {}
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        """One entry per prompt token, None for the first; grows with the prompt's chunks."""
        self._prompt_pieces = Detokenizer(vocabulary, skip_special_tokens=False)
        self._pooled: bytes | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more comes."""
        return self.num_unfinished == 0

    def append(self, child: CompletionState, output: EngineOutput) -> None:
        """Take in what is new for one completion."""
        if child.index == 0:
            self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
            if output.new_prompt_logprobs:
                self._append_prompt_logprobs(output.new_prompt_logprobs)
            self._pooled = output.pooled
        if output.error is not None:
            self.error = self.error or _engine_error(output)
        child.append(output)
        self._changed[child.index] = child

    def close(self, reason: FinishReason) -> None:
        """End every completion that is still open, with what it has."""
        for child in self.children:
            if child.finish_reason is None:
                self.append(child, EngineOutput(request_id=child.request_id, new_token_ids=[], finish_reason=reason))

    def take(self) -> RequestOutput | None:
        """What the caller gets now, or None while there is nothing worth saying.

        Where prompt logprobs are wanted nothing is said before all of them are there: every output has them, whatever
        the prompt's chunks.
        """
        if not self._changed or (self.kind is OutputKind.FINAL and not self.finished):
            return None
        wants_prompt, knows_prompt = self.params.prompt_logprobs is not None, self._knows_prompt
        if wants_prompt and not knows_prompt and self.children[0].finish_reason is None:
            return None
        changed = sorted(self._changed) if self.kind is OutputKind.DELTA else range(len(self.children))
        self._changed = {}
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[self.children[index].take(self.kind) for index in changed],
            prompt_logprobs=self._prompt_logprobs if wants_prompt and knows_prompt else None,
            num_cached_tokens=self.num_cached_tokens,
            finished=self.finished,
            pooled=self._pooled,
        )

    @property
    def _knows_prompt(self) -> bool:
        """Whether the prompt logprobs are complete."""
        return len(self._prompt_logprobs) >= len(self.prompt_token_ids)

    def _append_prompt_logprobs(self, new: list[TokenLogprobs]) -> None:
        """Take in a chunk's: each is turned into text once, as it comes."""
        known = len(self._prompt_logprobs)
        if known == 1:
            self._prompt_pieces.feed(self.prompt_token_ids[:1])
        token_ids = self.prompt_token_ids[known : known + len(new)]
        for token_id, candidates in zip(token_ids, new, strict=False):
            text = self._prompt_pieces.feed([token_id])
            self._prompt_logprobs.append(_candidates(candidates, self.vocabulary, text))


class OutputProcessor:
    """Every open request, fed with one step's outputs at a time."""

    def __init__(self, vocabulary: Vocabulary, metrics: Metrics) -> None:
        self.vocabulary = vocabulary
        self.metrics = metrics
        self.num_queued_tokens = 0
        """Prompt tokens of the requests that still wait for their first token."""
        self.observers: list[Callable[[RequestRecord], None]] = []
        """Told of every request that ends."""
        self.keeps_content = False
        """Whether they are told what was said, too."""
        self._children: dict[str, CompletionState] = {}
        self._requests: dict[int, RequestState] = {}

    @property
    def num_open(self) -> int:
        """Completions that are not finished."""
        return len(self._children)

    @property
    def requests(self) -> list[RequestState]:
        """Every open request, oldest first."""
        return list(self._requests.values())

    def add(self, state: RequestState) -> None:
        """Wait for the outputs of a request."""
        self._requests[id(state)] = state
        for child in state.children:
            self._children[child.request_id] = child
            if self.keeps_content:
                child.kept_token_ids = []
        self.num_queued_tokens += len(state.prompt_token_ids)
        self.metrics.num_open = len(self._children)

    def _leave_queue(self, state: RequestState) -> None:
        if state.is_queued:
            state.is_queued = False
            self.num_queued_tokens -= len(state.prompt_token_ids)

    def process(self, step: StepOutputs) -> list[str]:
        """Take in one step. Returns the engine's ids of sequences that a stop string ended."""
        now_s = step.stats.time_s
        for request_id in step.scheduled:
            child = self._children.get(request_id)
            if child is not None and not child.scheduled_s:
                child.scheduled_s = step.stats.start_s
        for request_id in step.preempted:
            child = self._children.get(request_id)
            if child is not None:
                child.num_preemptions += 1
        stopped: list[str] = []
        intervals: dict[float, int] = {}
        changed: dict[int, RequestState] = {}
        num_new_tokens = 0
        for output in step.outputs:
            child = self._children.get(output.request_id)
            if child is None:
                continue
            state = child.request
            if output.new_token_ids:
                num_new_tokens += len(output.new_token_ids)
                if child.last_token_s:
                    interval = now_s - child.last_token_s
                    intervals[interval] = intervals.get(interval, 0) + 1
                else:
                    self._begin(child, output, now_s)
                child.last_token_s = now_s
            elif output.pooled is not None:
                self._begin(child, output, now_s)
            elif output.error is not None and output.error_status == NonFiniteLogitsError.status:
                self.metrics.corrupted += 1
            state.append(child, output)
            changed[id(state)] = state
            if child.finish_reason is not None:
                if output.finish_reason is None:
                    stopped.append(child.request_id)
                self._finish(child, now_s)
        self.metrics.observe_step(step.stats, num_new_tokens)
        for interval, times in intervals.items():
            self.metrics.next_token_s.observe(interval, times)
        for state in changed.values():
            state.on_change()
        return stopped

    def _begin(self, child: CompletionState, output: EngineOutput, now_s: float) -> None:
        """The first token of a completion is there."""
        state = child.request
        child.first_token_s = now_s
        child.num_cached_tokens = output.num_cached_tokens
        self._leave_queue(state)
        self.metrics.observe_first_token(
            now_s - state.arrival_s, len(state.prompt_token_ids), output.num_cached_tokens, now_s
        )

    def abort(self, state: RequestState, now_s: float, reason: FinishReason = FinishReason.ABORT) -> list[str]:
        """Nobody waits any more. Returns the engine's ids of what was still open."""
        open_children = [child for child in state.children if child.request_id in self._children]
        state.close(reason)
        for child in open_children:
            self._finish(child, now_s)
        return [child.request_id for child in open_children]

    def fail(self, state: RequestState, error: PagemillError, now_s: float) -> None:
        """The whole request ends with an error."""
        state.error = state.error or error
        self.abort(state, now_s, FinishReason.ERROR)
        state.on_change()

    def _finish(self, child: CompletionState, now_s: float) -> None:
        del self._children[child.request_id]
        state = child.request
        state.num_unfinished -= 1
        self.metrics.num_open = len(self._children)
        scheduled_s = child.scheduled_s or now_s
        first_s = child.first_token_s or now_s
        assert child.finish_reason is not None
        self.metrics.observe_finished(
            RequestStats(
                finish_reason=child.finish_reason,
                num_prompt_tokens=len(state.prompt_token_ids),
                num_output_tokens=child.num_tokens,
                max_tokens=state.params.max_tokens or 0,
                e2e_s=now_s - state.arrival_s,
                queued_s=scheduled_s - state.arrival_s,
                prefill_s=first_s - scheduled_s,
                decode_s=max(0.0, child.last_token_s - first_s),
                num_computed_prompt_tokens=(
                    len(state.prompt_token_ids) - child.num_cached_tokens if child.first_token_s else 0
                ),
                num_preemptions=child.num_preemptions,
            ),
            now_s,
        )
        if state.finished:
            self._leave_queue(state)
            del self._requests[id(state)]
            self.metrics.params_n.observe(state.params.n)
            self.metrics.longest_output.observe(max(each.num_tokens for each in state.children))
            if self.observers:
                self._tell(state, now_s)

    def _tell(self, state: RequestState, now_s: float) -> None:
        """Whatever they do with it is no matter of the request."""
        try:
            record = _record(state, now_s)
            for observer in self.observers:
                observer(record)
        except Exception:
            logger.exception("a finished request could not be written down")


def _record(state: RequestState, now_s: float) -> RequestRecord:
    """The record of a request that has just ended; ``now_s`` on the monotonic clock."""
    children = state.children
    begun = [child.first_token_s for child in children if child.first_token_s]
    scheduled = [child.scheduled_s for child in children if child.scheduled_s]
    scheduled_s = min(scheduled, default=now_s)
    first_s = min(begun, default=now_s)
    kept = [child.kept_token_ids for child in children]
    return RequestRecord(
        request_id=state.request_id,
        caller=state.caller,
        params=state.params,
        streams=state.kind != "final",
        ended_s=time.time(),
        e2e_s=now_s - state.arrival_s,
        queue_s=scheduled_s - state.arrival_s,
        first_token_s=first_s - state.arrival_s if begun else None,
        prefill_s=first_s - scheduled_s,
        decode_s=max(0.0, max(child.last_token_s for child in children) - first_s),
        num_prompt_tokens=len(state.prompt_token_ids),
        num_cached_tokens=state.num_cached_tokens,
        num_output_tokens=sum(child.num_tokens for child in children),
        num_preemptions=sum(child.num_preemptions for child in children),
        finish_reasons=[child.finish_reason.value for child in children if child.finish_reason is not None],
        error=None if state.error is None else str(state.error),
        prompt=_text(state, state.prompt_token_ids) if None not in kept else None,
        outputs=[_text(state, ids) for ids in kept if ids is not None] or None,
    )


def _text(state: RequestState, token_ids: list[int]) -> str:
    detokenizer = Detokenizer(state.vocabulary, skip_special_tokens=False)
    return detokenizer.feed(token_ids) + detokenizer.close()


def _candidates(found: TokenLogprobs, vocabulary: Vocabulary, chosen_text: str) -> dict[int, Logprob]:
    """Candidates by id, the chosen one first and with the text that it completed."""
    texts = vocabulary.texts
    token_id, logprob, rank = found[0]
    entry = {token_id: Logprob(logprob if logprob > MIN_LOGPROB else MIN_LOGPROB, rank, chosen_text)}
    for token_id, logprob, rank in found[1:]:
        if token_id not in entry:
            text = texts.get(token_id) or vocabulary.shown(token_id)
            entry[token_id] = Logprob(logprob if logprob > MIN_LOGPROB else MIN_LOGPROB, rank, text)
    return entry


def _engine_error(output: EngineOutput) -> PagemillError:
    """The exception that an output's error stands for."""
    text = output.error or ""
    if output.error_status < 500:
        return RequestError(text, param=output.error_param)
    return NonFiniteLogitsError(text) if output.error_status == 500 else EngineError(text)

"""Beam search: the ``beam_width`` most probable continuations, found one token at a time.

Pure: the drivers (offline.py, and the server) run one request of one token for every beam and step, with logprobs; the
prefix cache makes that cheap, as a beam's whole blocks are there already and beams share theirs. The engine's core
knows nothing of it.

The rules are those of Wu et al. 2016 (section 7) as transformers applies them: of all continuations of all beams,
ordered by their sum of log probabilities, one that ends the text counts if it is among the first ``beam_width``; the
best others go on. Finished ones compete by sum / length ** length_penalty. The search ends when no beam that goes on
can pass the worst of ``beam_width`` finished ones any more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from pagemill.engine.detokenizer import Detokenizer, Vocabulary
from pagemill.errors import EngineError, RequestError
from pagemill.params import (
    MAX_LOGPROBS,
    BeamSearchParams,
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    SamplingParams,
)

__all__ = ["Beam", "BeamSearch", "step_params"]

Candidates = dict[int, Logprob]


@dataclass(slots=True, eq=False)
class Beam:
    """One continuation."""

    token_ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    """Sum over its tokens."""
    candidates: list[Candidates] = field(default_factory=list)
    """What could have stood in each place."""
    ended: bool = False
    """By an end-of-text token, which is its last."""


class BeamSearch:
    """The search over one prompt. ``room``: what the context leaves for its output."""

    def __init__(
        self, prompt_token_ids: list[int], params: BeamSearchParams, room: int, ending_ids: Collection[int]
    ) -> None:
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self._max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._ending = frozenset() if params.ignore_eos else frozenset(ending_ids)
        self._num_cached_tokens = 0
        self._running = [Beam()] if self._max_tokens else []
        """All equally long; empty when the search has ended."""
        self._finished = [] if self._max_tokens else [Beam()]

    def prompts(self) -> list[list[int]]:
        """What the next step starts from, a beam each; none when the search has ended."""
        return [self.prompt_token_ids + beam.token_ids for beam in self._running]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Take in the best next tokens of each beam, and choose."""
        for output in outputs:
            if output.outputs[0].finish_reason is FinishReason.ERROR or not output.outputs[0].logprobs:
                raise EngineError(output.outputs[0].error or "the request was stopped before it was finished")
        if not self._running[0].token_ids:
            self._num_cached_tokens = outputs[0].num_cached_tokens
        self._choose([(output.outputs[0].logprobs or [{}])[0] for output in outputs])

    def _choose(self, found: Sequence[Candidates]) -> None:
        width = self.params.beam_width
        grown = [
            (beam.logprob + each.logprob, beam, token, candidates)
            for beam, candidates in zip(self._running, found, strict=True)
            for token, each in candidates.items()
        ]
        grown.sort(key=lambda entry: -entry[0])
        running: list[Beam] = []
        for rank, (logprob, beam, token, candidates) in enumerate(grown):
            ends = token in self._ending
            if (rank < width) if ends else (len(running) < width):
                made = Beam([*beam.token_ids, token], logprob, [*beam.candidates, candidates], ends)
                (self._finished if ends else running).append(made)
        if running and len(running[0].token_ids) == self._max_tokens:
            self._finished += running
            running = []
        self._finished.sort(key=lambda beam: -self._score(beam))
        del self._finished[width:]
        self._running = running if running and self._may_improve(running[0]) else []

    def _score(self, beam: Beam, length: int | None = None) -> float:
        length = max(1, len(beam.token_ids) if length is None else length)
        return float(beam.logprob / length**self.params.length_penalty)

    def _may_improve(self, best: Beam) -> bool:
        """Whether a beam that goes on may still pass a finished one; sums only fall, so length is all it can gain."""
        if len(self._finished) < self.params.beam_width:
            return True
        length = self._max_tokens if self.params.length_penalty > 0 else len(best.token_ids)
        return self._score(best, length) > self._score(self._finished[-1])

    def output(
        self, request_id: str, prompt: str | None, vocabulary: Vocabulary, *, skip_special_tokens: bool = True
    ) -> RequestOutput:
        """The answer, the best beam first; its text without special tokens, unless they are wanted."""

        def detokenizer() -> Detokenizer:
            return Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens, at_start=at_start)

        at_start = all(token in vocabulary.special_ids for token in self.prompt_token_ids)
        return RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[self._completion(index, beam, detokenizer()) for index, beam in enumerate(self._finished)],
            num_cached_tokens=self._num_cached_tokens,
            finished=True,
        )

    def _completion(self, index: int, beam: Beam, detokenizer: Detokenizer) -> CompletionOutput:
        pieces: list[str] = []
        listed: list[Candidates] = []
        for token, candidates in zip(beam.token_ids, beam.candidates, strict=True):
            shown = len(pieces) + 1 < len(beam.token_ids) or not beam.ended
            pieces.append(detokenizer.feed([token]) if shown else "")
            if self.params.logprobs is not None:
                chosen = candidates[token]
                if shown:  # alone a token may be half a character
                    chosen = msgspec.structs.replace(chosen, decoded_token=pieces[-1])
                best = sorted(candidates.items(), key=lambda entry: entry[1].rank)[: self.params.logprobs]
                listed.append({token: chosen} | {other: each for other, each in best if other != token})
        return CompletionOutput(
            index=index,
            text="".join(pieces) + detokenizer.close(),
            token_ids=beam.token_ids,
            logprobs=None if self.params.logprobs is None else listed,
            cumulative_logprob=beam.logprob,
            finish_reason=FinishReason.STOP if beam.ended else FinishReason.LENGTH,
        )


def step_params(params: BeamSearchParams, ending_ids: Collection[int], most: int = MAX_LOGPROBS) -> SamplingParams:
    """Of a beam's next step: enough candidates that ``beam_width`` are left when some of them end the text."""
    params.verify()
    spare = 0 if params.ignore_eos else len(ending_ids)
    if params.beam_width + spare > most:
        raise RequestError(
            f"a beam width of {params.beam_width} is too large; it can be {most - spare}, as each step compares"
            f" {most} log probabilities, {spare} of which may end the text",
            param="n",
        )
    logprobs = max(params.beam_width + spare, params.logprobs or 0)
    return SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=logprobs, logprobs_mode="raw_logprobs"
    )

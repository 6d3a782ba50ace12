"""One HTTP request's work on the engine: its prompts, tokenised, running side by side.

Owns the fan-out over a list of prompts, ids, the bound on open sequences, and usage. A generator that is closed early
(a client went away) aborts what still runs.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pagemill.engine.beam_search import BeamSearch, step_params
from pagemill.engine.detokenizer import Vocabulary
from pagemill.engine.frontend import ADMITTED_A_TURN
from pagemill.engine.metrics import Metrics
from pagemill.errors import PromptTooLongError, QueueFullError, RequestError
from pagemill.params import BeamSearchParams, RequestOutput, SamplingParams
from pagemill.server.engine_port import Engine

__all__ = ["Admission", "Job", "Prompt", "Usage", "outputs", "response_id"]

MAX_ENTRIES = 1 << 18
"""Entries of one list parameter times sequences: each sequence sends and checks its own (0.1 s at the limit)."""


@dataclass(slots=True)
class Prompt:
    """What one sequence group starts from."""

    token_ids: list[int]
    text: str | None = None
    """As the caller wrote it; None for token ids."""


@dataclass(slots=True)
class Job:
    """Everything that the engine needs for one HTTP request."""

    prompts: list[Prompt]
    params: SamplingParams
    request_id: str
    priority: int = 0
    cache_salt: str | None = None
    constraint: str = "structured_outputs"
    """The request's field that ``params.structured_outputs`` was made of."""
    beams: BeamSearchParams | None = None
    """Search for the most probable continuations in place of sampling ``params.n``."""

    def __post_init__(self) -> None:
        """Refuse lists whose copies, one for each sequence, would hold up everybody else."""
        params = self.params
        sequences = len(self.prompts) * params.n
        for name in ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids"):
            entries = len(getattr(params, name) or ())
            if entries * sequences > MAX_ENTRIES:
                raise RequestError(
                    f"{name} has {entries} entries for each of {sequences} sequences; the limit is {MAX_ENTRIES} in"
                    " all; send fewer entries, prompts or a smaller n",
                    param=name,
                )

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, as far as they are not cut."""
        most = self.params.truncate_prompt_tokens
        return sum(
            min(most, len(each.token_ids)) if most and most > 0 else len(each.token_ids) for each in self.prompts
        )


class Admission:
    """Counts open sequences; one more than ``limit`` is refused, whole requests only."""

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self.limit = limit
        self._metrics = metrics
        self.open = 0
        self.idle = asyncio.Event()
        """Set while nothing is open."""
        self.idle.set()

    def enter(self, count: int) -> None:
        """Take ``count`` places or raise."""
        if count > self.limit:
            raise RequestError(
                f"the request asks for {count} sequences at once; the limit is {self.limit} "
                "(the server's --max-num-queued-reqs); send fewer prompts or a smaller n"
            )
        over = self.open + count - self.limit
        if over > 0:
            self._metrics.note_rejection("max_num_queued_reqs")
            raise QueueFullError(
                f"{self.open} sequences are waiting or running and the limit is {self.limit}; try again later",
                retry_after_s=self._metrics.retry_after_s(time.monotonic(), completions=over),
            )
        self.open += count
        self.idle.clear()

    def leave(self, count: int) -> None:
        """Give the places back."""
        self.open -= count
        if not self.open:
            self.idle.set()


@dataclass(slots=True)
class Usage:
    """Token counts of a response, by prompt and by choice: independent of the order in which things finish."""

    prompt: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Prompt index -> (tokens, of which cached)."""
    completion_tokens: int = 0

    def see(self, prompt_index: int, output: RequestOutput) -> None:
        """Note what an output says about its prompt."""
        _, cached = self.prompt.get(prompt_index, (0, 0))
        self.prompt[prompt_index] = (len(output.prompt_token_ids), max(cached, output.num_cached_tokens))

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        prompt = sum(tokens for tokens, _ in self.prompt.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self.prompt.values())},
        }


def response_id(prefix: str, given: str | None) -> str:
    """The answer's id: the caller's own where it gave one, always with a random part: two may give the same."""
    suffix = secrets.token_hex(12 if given is None else 4)
    return f"{prefix}-{suffix}" if given is None else f"{prefix}-{given}-{suffix}"


async def outputs(
    engine: Engine, admission: Admission, job: Job, kind: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(prompt index, output) as they come; ``kind`` is "delta" or "final"."""
    count = len(job.prompts) * job.params.n
    admission.enter(count)
    try:
        engine.check_room(job.num_prompt_tokens)
        if job.beams is not None:
            async for item in _beams(engine, job, job.beams):
                yield item
        elif len(job.prompts) == 1:
            async with aclosing(_generate(engine, job, 0, job.request_id, kind)) as stream:
                async for output in stream:
                    yield 0, output
        else:
            async with aclosing(_side_by_side(engine, job, kind)) as merged:
                async for item in merged:
                    yield item
    except RequestError as error:
        if error.param == "structured_outputs":
            error.param = job.constraint
            error.args = (str(error).replace("structured_outputs", job.constraint, 1),)
        raise
    finally:
        admission.leave(count)


def _generate(engine: Engine, job: Job, index: int, request_id: str, kind: str) -> AsyncGenerator[RequestOutput, None]:
    return engine.generate(
        job.prompts[index].token_ids,
        job.params,
        request_id,
        priority=job.priority,
        cache_salt=job.cache_salt,
        output_kind=kind,
        has_room=True,  # asked for all prompts of the job at once
    )


async def _beams(engine: Engine, job: Job, params: BeamSearchParams) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Step by step, the beams of all prompts side by side; each prompt's answer in the end."""
    ending_ids = engine.tokenizer.eos_ids
    one = step_params(params, ending_ids)
    searches = []
    for prompt in job.prompts:
        room = engine.max_model_len - len(prompt.token_ids)
        if room < max(1, params.max_tokens or 1):
            raise PromptTooLongError(
                f"the prompt has {len(prompt.token_ids)} tokens and max_tokens={params.max_tokens}; this model's"
                f" context is {engine.max_model_len} tokens",
                param="max_tokens",
            )
        searches.append(BeamSearch(prompt.token_ids, params, room, ending_ids))
    number = 0
    while any(steps := [search.prompts() for search in searches]):
        number += 1
        prompts = [Prompt(token_ids) for step in steps for token_ids in step]
        step_job = Job(prompts, one, f"{job.request_id}-{number}", job.priority, job.cache_salt)
        found: dict[int, RequestOutput] = {}
        async with aclosing(_side_by_side(engine, step_job, "final")) as stream:
            async for index, output in stream:
                found[index] = output
        outputs = iter([found[index] for index in range(len(prompts))])
        for search, step in zip(searches, steps, strict=True):
            if step:
                search.advance(list(itertools.islice(outputs, len(step))))
    vocabulary = Vocabulary(engine.tokenizer)
    for index, search in enumerate(searches):
        skips = job.params.skip_special_tokens
        yield index, search.output(job.request_id, job.prompts[index].text, vocabulary, skip_special_tokens=skips)


async def _side_by_side(engine: Engine, job: Job, kind: str) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async with aclosing(_generate(engine, job, index, f"{job.request_id}-{index}", kind)) as stream:
                async for output in stream:
                    queue.put_nowait((index, output))
        except Exception as error:  # noqa: BLE001  (raised again by the reader)
            queue.put_nowait((index, error))
        else:
            queue.put_nowait((index, None))

    pumps = []
    try:
        for index in range(len(job.prompts)):
            if index and index % max(1, ADMITTED_A_TURN // job.params.n) == 0:
                await asyncio.sleep(0)
            pumps.append(asyncio.create_task(pump(index)))
        running = len(pumps)
        while running:
            index, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

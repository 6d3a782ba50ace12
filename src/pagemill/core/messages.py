"""What crosses the core's borders: front -> core -> worker and back.

Columns rather than lists of objects where a message is sent every step. A request's tokens and blocks are sent once,
then only what is new (:class:`SchedulerOutput` is a diff). Nothing here knows text.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pagemill.params import FinishReason, SamplingParams

__all__ = [
    "BlockCopy",
    "EngineOutput",
    "EngineRequest",
    "NewRow",
    "SchedulerOutput",
    "SchedulerStats",
    "StepResult",
    "TokenLogprobs",
    "ending_token_ids",
]

TokenLogprobs = list[tuple[int, float, int]]
"""Candidates at one position as (token id, log probability, rank); the chosen token first, then the best ones."""


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Front -> core: one sequence to continue (``params.n`` is 1 here; the front fans out)."""

    request_id: str
    prompt_token_ids: list[int]
    """Empty between the processes: those of the request before it, which is another completion of the same prompt."""
    params: SamplingParams
    max_tokens: int
    """Resolved: never None, never past the context length."""
    arrival_time_s: float
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    """Lower goes first, as in vLLM."""
    deadline_s: float | None = None
    tenant: str = ""
    cache_salt: str | None = None
    """Requests share cached prefixes only with the same salt."""
    bad_words_token_ids: list[list[int]] = []
    seed: int = 0
    """Resolved: the front draws one when the caller gave none."""
    pooling: Literal["none", "last", "all"] = "none"
    """A vector is wanted and no token: made of the last token's hidden state, or of others', which the cache lacks."""
    second_segment: int | None = None
    """First token of the second of two texts, where an encoder tells them apart."""


def ending_token_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """Tokens that end an output. The worker must suppress all of them until ``params.min_tokens`` are out."""
    ending = params.stop_token_ids if params.ignore_eos else params.stop_token_ids + eos_token_ids
    return frozenset(ending)


class NewRow(msgspec.Struct, kw_only=True):
    """Core -> worker: everything about a request that starts, or starts again after preemption."""

    request_id: str
    token_ids: list[int]
    """Prompt, and for a resumed request what it had produced."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    block_ids: list[list[int]]
    """Per kind of layer (KV cache group): all blocks so far."""
    num_computed_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: list[list[int]] = []
    second_segment: int | None = None


class BlockCopy(msgspec.Struct, frozen=True):
    """Copy a shared block before it is written; done before the forward pass."""

    group: int
    source: int
    target: int


class SchedulerOutput(msgspec.Struct, kw_only=True):
    """Core -> worker: one step. The lists ``request_ids``, ``num_new_tokens``, ``new_block_ids`` are parallel.

    Order of effects in the worker: drop ``finished_request_ids`` and ``preempted_request_ids``, add ``new_rows``,
    append ``new_block_ids``, perform ``block_copies``, run the forward pass over the scheduled tokens.
    """

    step: int
    request_ids: list[str]
    num_new_tokens: list[int]
    """Tokens to compute for each request in this step, >= 1."""
    new_block_ids: list[list[list[int]] | None]
    """Per request: per group, blocks to append (None: nothing new, also for rows in ``new_rows``)."""
    new_rows: list[NewRow] = []
    finished_request_ids: list[str] = []
    preempted_request_ids: list[str] = []
    block_copies: list[BlockCopy] = []
    total_num_tokens: int = 0


class StepResult(msgspec.Struct, kw_only=True):
    """Worker -> core: what a step produced, parallel to ``SchedulerOutput.request_ids``."""

    token_ids: list[list[int]]
    """Sampled tokens per request; empty while a prompt is not yet wholly computed."""
    logprobs: list[list[TokenLogprobs] | None] | None = None
    """Per request, per sampled token; None where not asked for."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    """Request id -> for the prompt positions of this chunk, candidates of the NEXT prompt token."""
    non_finite: list[str] = []
    """Requests whose logits held NaN or infinity; they got no token."""
    nothing_allowed: list[str] = []
    """Requests whose own parameters forbid every token; they got none."""
    pooled: dict[str, bytes] = {}
    """Request id -> its vector as little-endian float32, once its prompt is wholly computed."""


class EngineOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Core -> front: what is new for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    new_prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_status: int = 500
    """HTTP status of ``error``."""
    error_param: str | None = None
    """The request's field that ``error`` is about, where it is the caller's."""
    pooled: bytes | None = None
    """The vector that was asked for, as :class:`StepResult` has it."""


class SchedulerStats(msgspec.Struct, kw_only=True):
    """Core -> front: the queues and the KV cache now, and totals since the start (``num_*_total``, tokens)."""

    num_running: int
    num_waiting: int
    num_blocks: int
    """All KV cache groups together."""
    num_used_blocks: int
    """Blocks that requests hold; shared ones counted once."""
    kv_cache_usage: float
    """Share of blocks in use, of the group where it is highest, 0 to 1."""
    prefix_query_tokens_total: int
    """Prompt tokens looked up for requests that start (not for those that resume)."""
    prefix_hit_tokens_total: int
    """Of those, tokens whose KV another request had computed."""
    num_preemptions_total: int
    allocated_slots: int
    """Token slots in the blocks held after the latest step was planned."""
    filled_slots: int
    """Of those, slots that hold a token once that step is computed."""
    slot_utilization: float
    """filled / allocated, averaged over all steps so far; 1 before the first."""

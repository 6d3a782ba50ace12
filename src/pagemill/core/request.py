"""One sequence on its way through the engine core: its tokens, how far they are computed, and what it holds.

Owns the state, and knows when the sequence has come to its end; decides nothing else. The scheduler moves it between
queues, the KV cache fills and empties its tables.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from pagemill.core.messages import EngineRequest, NewRow, TokenLogprobs, ending_token_ids
from pagemill.params import FinishReason

if TYPE_CHECKING:
    from pagemill.core.block_pool import Block

__all__ = ["FinishReason", "Request", "RequestStatus"]

NEVER = 1 << 62
"""A token count that no request reaches."""


class RequestStatus(IntEnum):
    """Where a request stands. WAITING (also after preemption) holds no blocks; RUNNING has a row in the worker."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Request:
    """Mutable state of one sequence. Counts are tokens unless a name says blocks."""

    __slots__ = (
        "arrival_time_s",
        "block_hashes",
        "block_tables",
        "capacity",
        "deadline_s",
        "ending_token_ids",
        "max_total_tokens",
        "message",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_skipped_blocks",
        "order",
        "preempted_at_step",
        "priority",
        "reads_cache",
        "request_id",
        "sequence",
        "settle_at",
        "status",
        "tenant",
        "token_ids",
    )

    def __init__(self, message: EngineRequest, *, sequence: int, max_total_tokens: int, num_groups: int) -> None:
        self.message = message
        self.request_id = message.request_id
        self.sequence = sequence
        """Counts requests as they come in; breaks every tie."""
        self.priority = message.priority
        self.arrival_time_s = message.arrival_time_s
        self.deadline_s = message.deadline_s
        self.tenant = message.tenant
        self.order: tuple[float, ...] = ()
        """The policy's key: lower goes first."""
        self.status = RequestStatus.WAITING

        self.token_ids = list(message.prompt_token_ids)
        """Prompt, then accepted output."""
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = max_total_tokens
        """It ends with LENGTH when it has this many."""
        self.ending_token_ids = ending_token_ids(message.params, message.eos_token_ids)

        self.num_computed_tokens = 0
        """Tokens whose KV is in the cache: the first so many of ``token_ids``."""
        self.block_tables: list[list[Block]] = [[] for _ in range(num_groups)]
        """Per group: logical block -> block. All have the same length; NULL_BLOCK behind a window."""
        self.capacity = 0
        """Slots in the tables: this many tokens may be computed before another block is needed."""
        self.settle_at = NEVER
        """The KV cache has something to publish or to drop once so many tokens are computed."""
        self.num_skipped_blocks = [0] * num_groups
        """Per group: leading table entries that a window has moved past."""

        self.block_hashes: list[bytes] = []
        """Chained hashes of full blocks of ``token_ids``, as far as anyone asked."""
        self.num_published_blocks = 0
        self.reads_cache = message.params.prompt_logprobs is None and message.pooling != "all"
        """A request that wants something of every prompt token computes them all and takes nothing from the cache."""
        self.num_cached_tokens = 0
        """Prompt tokens that another request had computed."""
        self.num_prompt_logprobs = 0
        """Prompt positions whose logprobs were sent to the front."""
        self.num_preemptions = 0
        self.preempted_at_step = -1

    @property
    def num_output_tokens(self) -> int:
        """Accepted output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    def new_row(self) -> NewRow:
        """All that the worker must know to start, or start again, this request."""
        message = self.message
        return NewRow(
            request_id=self.request_id,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            params=message.params,
            seed=message.seed,
            block_ids=[[block.id for block in table] for table in self.block_tables],
            num_computed_tokens=self.num_computed_tokens,
            eos_token_ids=message.eos_token_ids,
            bad_words_token_ids=message.bad_words_token_ids,
            second_segment=message.second_segment,
        )

    def accept(self, sampled: list[int]) -> FinishReason | None:
        """Append sampled tokens up to one that ends the request (``sampled`` is cut after it); why it ends."""
        token_ids, limit = self.token_ids, self.max_total_tokens
        if len(token_ids) >= limit:  # only the prompt was asked for
            sampled.clear()
            return FinishReason.LENGTH if self.message.pooling == "none" else FinishReason.STOP
        assert sampled, f"all tokens of {self} are computed, but none was sampled"
        for count, token in enumerate(sampled, start=1):
            token_ids.append(token)
            if token in self.ending_token_ids and self.num_output_tokens > self.message.params.min_tokens:
                reason = FinishReason.STOP
            elif len(token_ids) >= limit:
                reason = FinishReason.LENGTH
            else:
                continue
            del sampled[count:]
            return reason
        return None

    def stop_reason(self, reason: FinishReason) -> int | None:
        """The token id that stopped it; None for end-of-text and for any other reason."""
        token = self.token_ids[-1]
        is_eos = token in self.message.eos_token_ids and not self.message.params.ignore_eos
        return token if reason is FinishReason.STOP and not is_eos else None

    def unsent_prompt_logprobs(
        self, num_computed: int, candidates: list[TokenLogprobs] | None
    ) -> list[TokenLogprobs] | None:
        """What of the latest chunk's prompt logprobs is new (after a preemption, positions are computed again)."""
        if not candidates:
            return None
        start = self.num_computed_tokens - num_computed
        known = max(0, self.num_prompt_logprobs - start)
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, start + len(candidates))
        return candidates[known:] or None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )

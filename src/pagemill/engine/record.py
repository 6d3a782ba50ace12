"""What is remembered of a finished request, for whoever wants to write it down: logs, traces.

Holds the record; the output processor makes it and tells those who registered there. Must not know files, HTTP or
tracing libraries. Content is in it only where somebody asked for it to be kept.
"""

from __future__ import annotations

import msgspec

from pagemill.engine.caller import Caller
from pagemill.params import SamplingParams

__all__ = ["RequestRecord"]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request. Durations in seconds, from its arrival where nothing else is said."""

    request_id: str
    caller: Caller
    params: SamplingParams
    streams: bool
    ended_s: float
    """When, in seconds since 1970."""
    e2e_s: float
    queue_s: float
    """Until its first step."""
    first_token_s: float | None
    """Until its first token; None if it got none."""
    prefill_s: float
    """From its first step to its first token."""
    decode_s: float
    """From its first token to its last one."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    """Of all its completions."""
    num_preemptions: int
    finish_reasons: list[str]
    """One for each completion."""
    error: str | None
    prompt: str | None = None
    outputs: list[str] | None = None

"""What the front and the engine process say to each other beside requests: frames, figures, and facts.

Owns the shape of every frame on the socket between the two processes; one msgpack message is one frame. Must not
import torch or know text. Requests and their outputs themselves are in core/messages.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

import pagemill.errors
from pagemill.core.messages import EngineOutput, EngineRequest
from pagemill.errors import EngineError, PagemillError
from pagemill.model_config import ModelConfig

__all__ = [
    "Abort",
    "Add",
    "Call",
    "CallReply",
    "EngineFacts",
    "FromEngine",
    "Ready",
    "StartFailed",
    "StepOutputs",
    "StepStats",
    "Stop",
    "ToEngine",
    "raised",
    "reported",
]


class Add(msgspec.Struct, tag="add", array_like=True):
    """Front -> engine: requests to continue, in order of arrival."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """Front -> engine: requests nobody waits for any more."""

    request_ids: list[str]


class Call(msgspec.Struct, tag="call", array_like=True):
    """Front -> engine: an admin operation, done between two steps."""

    call_id: int
    name: str
    args: list[Any]


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """Front -> engine: end the process."""


ToEngine = Add | Abort | Call | Stop


class StepStats(msgspec.Struct, array_like=True):
    """Figures after one step. Counters run from the start of the engine process."""

    step: int = 0
    time_s: float = 0.0
    """When the step's tokens were there, on the monotonic clock."""
    start_s: float = 0.0
    """When the step was scheduled."""
    num_tokens: int = 0
    """Tokens computed in the step, prompts and decodes together."""
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    num_preemptions: int = 0
    slots_allocated: int = 0
    """KV slots in the blocks held during the step; each is one token of one kind of layer."""
    slots_filled: int = 0
    """Of those, slots that hold a token."""
    num_held: int = 0
    """Of those waiting, requests whose grammar is being built."""


class StepOutputs(msgspec.Struct, tag="step", array_like=True):
    """Engine -> front: everything one step produced, in one frame."""

    outputs: list[EngineOutput]
    stats: StepStats
    scheduled: list[str] = []
    """Requests that left the queue in this step."""
    preempted: list[str] = []
    """Requests that were put back into it for memory."""


class CallReply(msgspec.Struct, tag="reply", array_like=True):
    """Engine -> front: what a :class:`Call` returned, or why it failed."""

    call_id: int
    value: Any = None
    error: tuple[str, str] | None = None


class EngineFacts(msgspec.Struct, kw_only=True):
    """What the front must know about the engine that it talks to."""

    model_config: ModelConfig
    max_model_len: int
    """Longest context in tokens, after it was fitted to the memory."""
    block_size: int
    num_blocks: int
    """KV blocks over all kinds of layers."""
    memory_plan: str = ""
    """The plan as text, one term a line."""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """Engine -> front: the model is loaded, requests are taken."""

    facts: EngineFacts


class StartFailed(msgspec.Struct, tag="failed", array_like=True):
    """Engine -> front: why the engine cannot start, or why it ends: type and text of the exception."""

    error: tuple[str, str]


FromEngine = StepOutputs | CallReply | Ready | StartFailed


def reported(error: BaseException) -> tuple[str, str]:
    """An exception as it crosses the border: the name of its type and its text."""
    return type(error).__name__, str(error)


def raised(error: tuple[str, str]) -> PagemillError:
    """The other side of :func:`reported`: the same type if it is one of ours, else :class:`EngineError`."""
    name, text = error
    if name in pagemill.errors.__all__:
        kind: type[PagemillError] = getattr(pagemill.errors, name)
        return kind(text)
    return EngineError(f"{name}: {text}" if text else name)

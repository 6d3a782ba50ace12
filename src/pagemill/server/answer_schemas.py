"""What answers look like, for the OpenAPI schema alone: handlers write JSON without going through these.

A test validates real answers against them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

__all__ = [
    "ChatCompletionChunk",
    "ChatCompletionResponse",
    "CompletionChunk",
    "CompletionResponse",
    "DetokenizeResponse",
    "ErrorResponse",
    "HealthResponse",
    "ModelCard",
    "ModelList",
    "TokenizeResponse",
    "TokenizerInfoResponse",
    "VersionResponse",
]

Reason = Literal["stop", "length", "abort", "error", "tool_calls", "content_filter"]


class PromptTokensDetails(BaseModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class UsageResponse(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """Columns, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason | None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(BaseModel):
    """Answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageResponse


class TopLogprob(BaseModel):
    """One candidate."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """One token and its best candidates."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of a message's tokens."""

    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None


class CalledFunction(BaseModel):
    """Which, and with what."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The answer itself."""

    role: str
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(BaseModel):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageResponse
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChunkChoice(CompletionChoice):
    """Some more of one completion; the last one has the reason."""


class CompletionChunk(BaseModel):
    """An event of a streamed /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: UsageResponse | None = None


class CalledFunctionDelta(BaseModel):
    """The name comes once, the arguments in pieces."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(BaseModel):
    """More of one call; id, type and name come with the first piece."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionDelta


class ChatDelta(BaseModel):
    """More of a message."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """More of one answer; the last one has the reason and an empty delta."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """An event of a streamed /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageResponse | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class TokenizeResponse(BaseModel):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfoResponse(BaseModel):
    """Answer of GET /tokenizer_info: the texts of the special tokens; null where the model has none."""

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    vocab_size: int
    model_max_length: int


class DetokenizeResponse(BaseModel):
    """Answer of POST /detokenize."""

    prompt: str


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(BaseModel):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class BlockMapResponse(BaseModel):
    """The KV blocks now: one letter a block, by id: f free, c cached, p private (one holder), s shared."""

    groups: list[str]
    """Per kind of layer."""


class HealthResponse(BaseModel):
    """The engine is well."""

    status: Literal["ok"]


class VersionResponse(BaseModel):
    """Pagemill's version."""

    version: str


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every error."""

    error: ErrorDetail

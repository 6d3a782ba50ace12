"""What the Responses API answers, for the OpenAPI schema alone: handlers write JSON without going through these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel

__all__ = ["DeletedResponse", "InputTokens", "ResponseEvent", "ResponseItemList", "ResponseObject"]

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(BaseModel):
    """Text of a message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[dict[str, Any]] | None = None


class ReasoningPart(BaseModel):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(BaseModel):
    """A turn."""

    type: Literal["message"]
    id: str
    status: Status
    role: str
    content: list[TextPart]


class FunctionCallItem(BaseModel):
    """A call that the model wants."""

    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(BaseModel):
    """What a call gave."""

    type: Literal["function_call_output"]
    id: str
    status: Status
    call_id: str
    output: str | list[TextPart]


class ReasoningItem(BaseModel):
    """Reasoning ahead of an answer."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[dict[str, Any]]
    content: list[ReasoningPart]


Item = Annotated[MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem, Field(discriminator="type")]


class CachedTokens(BaseModel):
    """Where the input's tokens came from."""

    cached_tokens: int


class ReasoningTokens(BaseModel):
    """What the output's tokens were for."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseFailure(BaseModel):
    """Why it failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why it was cut."""

    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """Answer of POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class LifecycleEvent(BaseModel):
    """The response has come this far."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseObject


class ItemEvent(BaseModel):
    """An item begins or is done."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: Item


class PartEvent(BaseModel):
    """A part of an item begins or is done."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: TextPart | ReasoningPart


class TextDeltaEvent(BaseModel):
    """More text."""

    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[dict[str, Any]] | None = None


class TextDoneEvent(BaseModel):
    """The whole text."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[dict[str, Any]] | None = None


class ArgumentsDeltaEvent(BaseModel):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(BaseModel):
    """The whole arguments."""

    type: Literal["response.function_call_arguments.done"]
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class ResponseEvent(
    RootModel[
        Annotated[
            LifecycleEvent
            | ItemEvent
            | PartEvent
            | TextDeltaEvent
            | TextDoneEvent
            | ArgumentsDeltaEvent
            | ArgumentsDoneEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """An event of a streamed /v1/responses."""


class ResponseItemList(BaseModel):
    """Answer of GET /v1/responses/{id}/input_items."""

    object: Literal["list"]
    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool


class DeletedResponse(BaseModel):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(BaseModel):
    """Answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int

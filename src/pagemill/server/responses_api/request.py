"""POST /v1/responses as it comes in, and the chat request that it amounts to.

Owns the fields' names and how they are written in a chat request. Their meaning and bounds are the chat request's: an
error found there is told under the name that the caller used.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from pagemill.errors import RequestError
from pagemill.server.protocol import ChatCompletionRequest
from pagemill.server.structured import Model
from pagemill.server.validation import from_validation

__all__ = ["EXTENSIONS", "ReasoningParam", "ResponsesRequest", "TextParam", "renamed_errors"]

EXTENSIONS = frozenset(
    {
        "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "min_tokens",
        "ignore_eos", "stop", "stop_token_ids", "include_stop_str_in_output", "logit_bias", "allowed_token_ids",
        "bad_words", "skip_special_tokens", "structured_outputs", "chat_template", "chat_template_kwargs", "documents",
        "priority", "cache_salt",
    }
)  # fmt: skip
"""Fields of a chat request that OpenAI's Responses API lacks, taken under the same names."""
REFUSED = frozenset({"conversation", "prompt", "context_management"})
LOGPROBS = "message.output_text.logprobs"
NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "prompt": "input",
}
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
"""OpenAI's bounds of metadata."""


class TextParam(Model):
    """What the text looks like."""

    format: dict[str, Any] | None = Field(None, description="text, json_object or json_schema.")
    verbosity: str | None = None


class ReasoningParam(Model):
    """How much to think."""

    effort: str | None = Field(None, max_length=32, description="For the template; none turns thinking off.")
    summary: str | None = None


class ResponseStreamOptions(Model):
    """Accepted; nothing is obfuscated."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Model):
    """POST /v1/responses. Chat's sampling parameters that OpenAI lacks here (top_k, seed, stop, ...) are taken too."""

    model: str | None = Field(None, description="Served name; empty or absent means the default model.")
    input: str | list[dict[str, Any]] | None = Field(None, description="Text, or items: messages, calls and outputs.")
    instructions: str | None = Field(None, description="A system message for this response alone.")
    previous_response_id: str | None = Field(None, description="Go on from a stored response.")
    stream: bool | None = Field(None, description="Send typed server-sent events.")
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(None, description="Keep the response for retrieval, in memory. Default true.")
    background: bool | None = Field(None, description="Answer at once and go on without the client.")
    max_output_tokens: int | None = Field(None, ge=1, description="Most output tokens, reasoning included.")
    temperature: float | None = Field(None, description="0 is greedy; 0 to 2. Default 1.")
    top_p: float | None = Field(None, description="In (0, 1]. Default 1.")
    top_logprobs: int | None = Field(None, description="0 to 20 of the best candidates for each token.")
    include: list[str] | None = Field(None, description=f"{LOGPROBS} adds log probabilities.")
    tools: list[dict[str, Any]] | None = Field(None, description="Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(None, description="auto, none, required or one function.")
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls. Default true.")
    text: TextParam | None = None
    reasoning: ReasoningParam | None = None
    truncation: Literal["auto", "disabled"] | None = Field(None, description="auto drops the oldest messages to fit.")
    metadata: dict[str, str] | None = Field(None, description="At most 16 pairs, given back as they are.")
    max_tool_calls: int | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None

    @property
    def kept(self) -> bool:
        """Whether the response is stored."""
        return self.store is not False

    def verify(self) -> None:
        """What no chat request knows. Raises RequestError."""
        for name in self.model_extra or {}:
            if name in REFUSED and (self.model_extra or {})[name] is not None:
                raise RequestError(f"{name} is not supported by this version; leave it out", param=name)
        if self.background and not self.kept:
            raise RequestError("background needs store: the response is fetched later", param="background")
        pairs = self.metadata or {}
        if len(pairs) > MAX_PAIRS or any(len(key) > MAX_KEY or len(pairs[key]) > MAX_VALUE for key in pairs):
            raise RequestError(
                f"metadata has {len(pairs)} pairs; at most {MAX_PAIRS} are taken, keys up to {MAX_KEY} and values up to"
                f" {MAX_VALUE} characters",
                param="metadata",
            )

    def chat_request(self, messages: list[dict[str, Any]]) -> ChatCompletionRequest:
        """The same as a chat request over ``messages``. Raises RequestError."""
        wanted = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        values: dict[str, Any] = {name: value for name, value in (self.model_extra or {}).items() if name in EXTENSIONS}
        values |= {
            "messages": messages,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": wanted or None,
            "top_logprobs": self.top_logprobs,
            "tools": None if self.tools is None else [_chat_tool(tool) for tool in self.tools],
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._response_format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        try:
            return ChatCompletionRequest.model_validate(values)
        except ValidationError as error:
            raise from_validation(error) from None

    def _response_format(self) -> dict[str, Any] | None:
        if self.text is None or self.text.format is None:
            return None
        wanted = dict(self.text.format)
        if wanted.get("type") != "json_schema":
            return wanted
        schema = {name: wanted[name] for name in ("name", "description", "schema", "strict") if name in wanted}
        return {"type": "json_schema", "json_schema": schema}


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A flat tool as chat nests it; what is no function is left for chat to refuse."""
    if tool.get("type") != "function":
        return tool
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [_chat_choice(each) for each in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    if choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


class renamed_errors:  # noqa: N801  (reads as a statement: with renamed_errors())
    """Within the block, a RequestError names the field as the Responses API does."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if isinstance(error, RequestError) and error.param is not None:
            head, dot, tail = error.param.replace(".function", "").partition(".")
            error.param = NAMES.get(head, head) + dot + tail

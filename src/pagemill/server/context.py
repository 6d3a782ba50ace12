"""What every handler needs: the engine, the configuration, and checks that all routes share.

Owns the served model's name, the admission counter and the switch that turns new requests away while draining.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagemill.config import ServerConfig
from pagemill.errors import ModelNotFoundError, PromptTooLongError, RequestError
from pagemill.models.chat_template import ChatTemplate
from pagemill.params import SamplingParams
from pagemill.server.block_map import BlockMap
from pagemill.server.body import read_body
from pagemill.server.engine_port import Engine
from pagemill.server.generation import Admission
from pagemill.server.keys import Keys
from pagemill.server.memory import MemoryReturn
from pagemill.server.offload import off_loop
from pagemill.server.parsers.registry import Formats
from pagemill.server.protocol import ChatCompletionRequest, RequestT, TokenizeRequest, parse
from pagemill.server.request_log import NoLog, RefusalLog
from pagemill.server.responses_api.store import ResponseStore
from pagemill.server.structured import schema_hint, with_hint

__all__ = ["BODY_BYTES", "ServerContext", "chat_messages", "json_response", "text_of"]


logger = logging.getLogger("pagemill.server")

BODY_BYTES = "pagemill.body_bytes"
"""Where the scope of a request says how long its body was."""
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Template variables that are fields of the request."""
CHARS_OF_A_PART = 64
"""A message or a part of one costs a template about as much as this much text."""


class ServerContext:
    """One per application."""

    def __init__(self, engine: Engine, config: ServerConfig, keys: Keys | None = None) -> None:
        self.engine = engine
        self.keys = keys or Keys(config.api_key, config.api_key_file)
        self.config = dataclasses.replace(config, api_key=())
        self.admission = Admission(config.max_num_queued_reqs, engine.metrics)
        self.model_name = config.served_model_name or engine.model_name
        self.chat_template = engine.chat_template
        self.formats = Formats.chosen(config, self.chat_template)
        """How the model writes tool calls and reasoning."""
        tokenizer = engine.tokenizer
        self.special_tokens = frozenset(tokenizer.id_to_token(index) or "" for index in tokenizer.special_ids)
        """Their texts."""
        self.defaults = _usable(engine.text.default_values())
        """Sampling parameters of requests that do not say."""
        self.block_map = BlockMap(engine)
        self.responses = ResponseStore(config.max_stored_responses, config.max_stored_response_bytes)
        self.log: RefusalLog = NoLog()
        """Told of requests that are answered with an error."""
        self.memory = MemoryReturn()
        self.traces = False
        """Whether callers' trace contexts are wanted."""
        self.draining = False
        """Set once, on SIGTERM: open requests go on, new ones are answered 503."""

    async def read(self, request: Request, cls: type[RequestT]) -> RequestT:
        """Body -> checked request."""
        body = await read_body(request, self.config.max_body_bytes)
        request.scope[BODY_BYTES] = len(body)
        return parse(cls, body)

    def check_model(self, name: str | None) -> None:
        """Empty or absent means the default; any other name must be the served one."""
        if name and name != self.model_name:
            raise ModelNotFoundError(f"the model {name[:200]!r} does not exist; this server has {self.model_name!r}")

    def check_length(self, text: str, params: SamplingParams) -> None:
        """Refuse what is far too long for the context before it is tokenised, unless it is to be cut."""
        limit = self.engine.max_model_len
        if len(text) <= limit or params.truncate_prompt_tokens is not None:
            return
        fewest = self.engine.tokenizer.min_tokens(text)
        if fewest > limit:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, which are {fewest} tokens or more, and this model's context is"
                f" {limit} tokens; shorten the prompt or set truncate_prompt_tokens",
                param="prompt",
            )

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenise; long texts off the event loop."""
        tokenizer = self.engine.tokenizer
        return await off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def render_chat(self, request: ChatCompletionRequest | TokenizeRequest) -> str:
        """Messages -> the prompt's text, by the model's (or the request's own) template."""
        messages = chat_messages(request)
        template = self.chat_template
        if request.chat_template is not None:
            template = self._own_template(request.chat_template)
        if template is None:
            raise RequestError(
                "the model has no chat template; give one with --chat-template, or use /v1/completions",
                param="messages",
            )
        going_on = bool(request.continue_final_message)
        if "developer" not in template.source:  # OpenAI's newer name for the same
            messages = [each | {"role": "system"} if each["role"] == "developer" else each for each in messages]
        opening = not going_on if request.add_generation_prompt is None else request.add_generation_prompt
        variables = dict(request.chat_template_kwargs or {})
        if taken := RESERVED & variables.keys():
            raise RequestError(f"{min(taken)!r} is a field of its own", param="chat_template_kwargs")
        if request.documents is not None:
            variables["documents"] = request.documents
        effort = request.reasoning_effort if isinstance(request, ChatCompletionRequest) else None
        if effort is not None:
            variables.setdefault("reasoning_effort", effort)
            if effort == "none":
                variables.setdefault("enable_thinking", False)
        chars = sum(CHARS_OF_A_PART * _parts_of(message) + len(text_of(message)) for message in messages)
        chosen = template

        def render() -> str:
            return chosen.render(
                messages,
                tools=None if getattr(request, "tool_choice", None) == "none" else request.tools or None,
                add_generation_prompt=opening,
                continue_final_message=going_on,
                **variables,
            )

        return await off_loop(chars if request.chat_template is None else 1 << 30, render)

    def use_template(self, source: str) -> None:
        """Put this Jinja source in place of the model's own template."""
        self.chat_template = self._own_template(source)
        self.chat_template.warn_if_broken()
        self.formats = Formats.chosen(self.config, self.chat_template)

    def tokens_as_ids(self, wanted: bool | None) -> bool:
        """Whether logprobs name tokens by their ids."""
        return self.config.return_tokens_as_token_ids if wanted is None else wanted

    def formats_for(self, request: ChatCompletionRequest) -> Formats:
        """The formats that fit the request's own template, if it brings one."""
        if request.chat_template is None:
            return self.formats
        return Formats.chosen(self.config, self._own_template(request.chat_template))

    def _own_template(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, self.engine.tokenizer)


def _usable(defaults: dict[str, Any]) -> dict[str, Any]:
    """What a model recommends, unless it is out of bounds."""
    try:
        SamplingParams.create(**defaults)
    except (RequestError, TypeError) as error:
        logger.warning("the model's generation_config is passed over: %s", error)
        return {}
    if defaults:
        logger.info("the model's own sampling defaults hold where a request says nothing: %s", defaults)
    return defaults


def _parts_of(message: dict[str, Any]) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, list) else 1


def chat_messages(request: ChatCompletionRequest | TokenizeRequest) -> list[dict[str, Any]]:
    """Messages as plain data, absent fields absent; the template shapes their content."""
    messages = [message.model_dump(exclude_none=True) for message in request.messages or ()]
    hint = schema_hint(request.response_format) if isinstance(request, ChatCompletionRequest) else None
    return messages if hint is None else with_hint(messages, hint)


def text_of(message: dict[str, Any]) -> str:
    """A message's text, its parts joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return str(content or "")


def json_response(content: Any, headers: dict[str, str] | None = None) -> Response:
    """Any JSON value, encoded by msgspec."""
    return Response(msgspec.json.encode(content), headers=headers, media_type="application/json")

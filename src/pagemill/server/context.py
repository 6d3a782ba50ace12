"""What every handler needs: the engine, the configuration, and checks that all routes share.

Owns the served model's name, the admission counter and the switch that turns new requests away while draining.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagemill.config import ServerConfig
from pagemill.errors import ModelNotFoundError, RequestError
from pagemill.server.body import read_body
from pagemill.server.engine_port import Engine
from pagemill.server.generation import Admission, off_loop
from pagemill.server.protocol import ChatCompletionRequest, RequestT, TokenizeRequest, parse

__all__ = ["ServerContext", "json_response"]


class ServerContext:
    """One per application; ``app.state.context``."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.admission = Admission(config.max_num_queued_reqs)
        self.model_name = config.served_model_name or engine.model_name
        self.chat_template = engine.chat_template
        self.draining = False
        """Set once, on SIGTERM: open requests go on, new ones are answered 503."""

    async def read(self, request: Request, cls: type[RequestT]) -> RequestT:
        """Body -> checked request."""
        return parse(cls, await read_body(request, self.config.max_body_bytes))

    def check_model(self, name: str | None) -> None:
        """Empty or absent means the default; any other name must be the served one."""
        if name and name != self.model_name:
            raise ModelNotFoundError(f"the model {name[:200]!r} does not exist; this server has {self.model_name!r}")

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
        opening = not going_on if request.add_generation_prompt is None else request.add_generation_prompt
        variables = dict(request.chat_template_kwargs or {})
        for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
            if name in variables:
                raise RequestError(
                    f"chat_template_kwargs holds {name!r}; it is a field of its own", param="chat_template_kwargs"
                )
        if request.documents is not None:
            variables["documents"] = request.documents
        chars = sum(len(message["content"]) for message in messages if isinstance(message["content"], str))
        chosen = template

        def render() -> str:
            return chosen.render(
                messages,
                tools=request.tools or None,
                add_generation_prompt=opening,
                continue_final_message=going_on,
                **variables,
            )

        return await off_loop(chars if request.chat_template is None else 1 << 30, render)

    def use_template(self, source: str) -> None:
        """Put this Jinja source in place of the model's own template."""
        self.chat_template = self._own_template(source)

    def _own_template(self, source: str) -> Any:
        from pagemill.models.chat_template import ChatTemplate

        return ChatTemplate(source, self.engine.tokenizer)


def chat_messages(request: ChatCompletionRequest | TokenizeRequest) -> list[dict[str, Any]]:
    """Messages as templates want them: text parts joined, absent fields absent."""
    if not request.messages:
        raise RequestError("messages is empty, and the prompt cannot be empty; send at least one", param="messages")
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(request.messages):
        entry = message.model_dump(exclude_none=True)
        content = message.content
        entry["content"] = content if not isinstance(content, list) else _joined_parts(content, index)
        if content is None:
            entry["content"] = "" if message.tool_calls is None else None
        plain.append(entry)
    return plain


def _joined_parts(parts: list[dict[str, Any]], index: int) -> str:
    texts: list[str] = []
    for number, part in enumerate(parts):
        where = f"messages.{index}.content.{number}"
        kind, text = part.get("type"), part.get("text")
        if kind not in ("text", "input_text"):
            raise RequestError(f"{where}.type={str(kind)[:40]!r} is not supported; it must be 'text'", param=where)
        if not isinstance(text, str):
            raise RequestError(f"{where}.text must be a string", param=where)
        texts.append(text)
    return "".join(texts)


def json_response(content: Any, headers: dict[str, str] | None = None) -> Response:
    """Any JSON value, encoded by msgspec."""
    return Response(msgspec.json.encode(content), headers=headers, media_type="application/json")

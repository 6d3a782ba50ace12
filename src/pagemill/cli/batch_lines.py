"""One line of a batch file: from JSON to a request, and from an answer back to JSON.

Three forms are read: ``{"prompt": ...}`` and ``{"messages": [...]}``, each with sampling parameters beside it, and
OpenAI's batch form ``{"custom_id", "url", "body"}``. Answers have OpenAI's shapes. Must not do I/O or know the engine;
what the HTTP API reads and writes the same way is the server's own code, imported where a line needs it.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagemill.errors import PagemillError, RequestError
from pagemill.params import CompletionOutput, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from pagemill.models.tokenizer import Tokenizer
    from pagemill.server.structured import Constraints

__all__ = ["BatchLine", "answer", "conversation", "failure", "parse_line", "sampling_params", "template_options"]

_IGNORED = frozenset(
    {"custom_id", "line", "model", "user", "stream", "stream_options", "metadata", "store", "service_tier"}
    | {"safety_identifier", "prompt_cache_key", "verbosity"}
)
"""What says nothing about the text of an answer."""
_TEMPLATE = frozenset({"tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"})
_CONSTRAINTS = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
)
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
"""The HTTP API's fields that only a server has, and their values that ask for nothing."""
_URLS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}


@dataclass(frozen=True, kw_only=True)
class BatchLine:
    """A request as it was written."""

    number: int
    """Of the line, from 1."""
    custom_id: str | None
    is_batch_form: bool
    """OpenAI's batch form; its answer wraps the body in ``response``."""
    body: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether the body is a conversation."""
        return "messages" in self.body

    @property
    def key(self) -> str:
        """What the line is known by when the work is resumed."""
        return f"line {self.number}" if self.custom_id is None else f"id {self.custom_id}"


def parse_line(number: int, text: str) -> BatchLine:
    """Read a line; :class:`RequestError` says what is wrong with it."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RequestError(f"the line is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the line is {type(value).__name__}; it must be a JSON object")
    custom_id = value.get("custom_id")
    if custom_id is not None and not isinstance(custom_id, str):
        raise RequestError(f"custom_id={custom_id!r} must be a string", param="custom_id")
    is_batch_form = "body" in value
    body = value["body"] if is_batch_form else value
    if not isinstance(body, dict):
        raise RequestError("body must be a JSON object", param="body")
    url = value.get("url")
    if is_batch_form and url is not None and url not in _URLS:
        raise RequestError(f"url={url!r} is unknown; known: {', '.join(_URLS)}", param="url")
    present = [name for name in ("prompt", "messages") if name in body]
    if len(present) != 1 or (is_batch_form and url is not None and present[0] != _URLS[url]):
        raise RequestError("the line needs exactly one of 'prompt' and 'messages'", param="prompt")
    return BatchLine(number=number, custom_id=custom_id, is_batch_form=is_batch_form, body=body)


def sampling_params(line: BatchLine, defaults: dict[str, Any]) -> SamplingParams:
    """The line's parameters over ``defaults``, under the HTTP API's names."""
    given = {name: value for name, value in line.body.items() if value is not None}
    for name in (*_IGNORED, *_TEMPLATE, *_CONSTRAINTS, "prompt", "messages"):
        given.pop(name, None)
    for name, harmless in _WITHOUT_EFFECT.items():
        if given.pop(name, harmless[0]) not in harmless:
            raise RequestError(f"{name} is for servers only; leave it out, or use pagemill serve", param=name)
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    top = given.pop("top_logprobs", None)
    if isinstance(given.get("logprobs"), bool):
        given["logprobs"] = (top or 0) if given["logprobs"] else None
    elif top is not None:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    constraints = _constraints(line)
    if constraints is not None:
        from pagemill.server.structured import structured_outputs

        given["structured_outputs"] = structured_outputs(constraints)
    return SamplingParams.create(**{**defaults, **given})


def _constraints(line: BatchLine) -> Constraints | None:
    given = {name: line.body[name] for name in _CONSTRAINTS if line.body.get(name) is not None}
    if not given:
        return None
    from pydantic import ValidationError

    from pagemill.server.structured import Constraints
    from pagemill.server.validation import from_validation

    try:
        return Constraints.model_validate(given)
    except ValidationError as error:
        raise from_validation(error) from None


def conversation(line: BatchLine) -> list[dict[str, Any]]:
    """The line's messages; a schema that is not enforced is part of them."""
    messages = line.body["messages"]
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise RequestError("messages must be a list of objects", param="messages")
    constraints = _constraints(line)
    if constraints is None:
        return messages
    from pagemill.server.structured import schema_hint, with_hint

    hint = schema_hint(constraints.response_format)
    return messages if hint is None else with_hint(messages, hint)


def template_options(line: BatchLine) -> dict[str, Any]:
    """The line's options for the chat template."""
    options = {name: line.body[name] for name in _TEMPLATE if line.body.get(name) is not None}
    if line.body.get("tool_choice") == "none":
        options.pop("tools", None)
    variables = options.pop("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise RequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    return {**options, **variables}


def answer(
    line: BatchLine, output: RequestOutput, params: SamplingParams, model: str, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The line of the output file for an answered request."""
    produced = sum(len(each.token_ids) for each in output.outputs)
    prompt = len(output.prompt_token_ids)
    body = {
        "id": f"{'chatcmpl' if line.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if line.is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(line, each, params, tokenizer) for each in output.outputs],
        "usage": {"prompt_tokens": prompt, "completion_tokens": produced, "total_tokens": prompt + produced},
    }
    if line.is_batch_form:
        wrapped = {"status_code": 200, "request_id": output.request_id, "body": body}
        return {**_name(line.number, line.custom_id), "response": wrapped, "error": None}
    return {**_name(line.number, line.custom_id), **body}


def failure(number: int, custom_id: str | None, error: PagemillError) -> dict[str, Any]:
    """The line of the output file for a request that could not be answered."""
    about = {"message": str(error), "type": type(error).__name__, "param": getattr(error, "param", None)}
    return {**_name(number, custom_id), "error": {**about, "code": error.status}}


def _name(number: int, custom_id: str | None) -> dict[str, Any]:
    return {"line": number} if custom_id is None else {"line": number, "custom_id": custom_id}


def _choice(line: BatchLine, output: CompletionOutput, params: SamplingParams, tokenizer: Tokenizer) -> dict[str, Any]:
    text = {"message": {"role": "assistant", "content": output.text}} if line.is_chat else {"text": output.text}
    logprobs = None if output.logprobs is None else _logprobs(line, output, params, tokenizer)
    choice: dict[str, Any] = {"index": output.index, **text, "logprobs": logprobs}
    return {**choice, "finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


def _logprobs(
    line: BatchLine, output: CompletionOutput, params: SamplingParams, tokenizer: Tokenizer
) -> dict[str, Any]:
    from pagemill.server.logprobs import TokenTexts, chat_logprobs, completion_logprobs

    found = output.logprobs or []
    token_ids = output.token_ids if found else []
    if line.is_chat:
        listed = params.logprob_token_ids or ()
        return chat_logprobs(found, token_ids, params.logprobs or 0, tokenizer, listed=listed)
    texts = TokenTexts(tokenizer, skip_special_tokens=params.skip_special_tokens)
    return completion_logprobs(found, token_ids, texts.of_output(token_ids, found))

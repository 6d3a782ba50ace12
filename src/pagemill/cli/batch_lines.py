"""One line of a batch file: from JSON to a request, and from an answer back to JSON.

Three forms are read: ``{"prompt": ...}`` and ``{"messages": [...]}``, each with sampling parameters beside it, and
OpenAI's batch form ``{"custom_id", "url", "body"}``. Answers have OpenAI's shapes. Must not do I/O or know the engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pagemill.errors import PagemillError, RequestError
from pagemill.params import CompletionOutput, RequestOutput, SamplingParams

__all__ = ["BatchLine", "answer", "failure", "parse_line", "sampling_params", "template_options"]

_IGNORED = {"custom_id", "model", "user", "stream", "metadata", "store"}
_TEMPLATE = {"tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
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
    """The line's parameters over ``defaults``, OpenAI's names read as well."""
    given = {name: value for name, value in line.body.items() if value is not None}
    for name in (*_IGNORED, *_TEMPLATE, "prompt", "messages"):
        given.pop(name, None)
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    if isinstance(given.get("logprobs"), bool):
        wanted = given.pop("logprobs")
        top = given.pop("top_logprobs", 0)
        if wanted:
            given["logprobs"] = top
    if "logit_bias" in given:
        given["logit_bias"] = _logit_bias(given["logit_bias"])
    return SamplingParams.create(**{**defaults, **given})


def _logit_bias(value: Any) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in value.items()}
    except (AttributeError, ValueError):
        raise RequestError("logit_bias must be an object from token ids to numbers", param="logit_bias") from None


def template_options(line: BatchLine) -> dict[str, Any]:
    """The line's options for the chat template."""
    options = {name: line.body[name] for name in _TEMPLATE if line.body.get(name) is not None}
    return {**options, **options.pop("chat_template_kwargs", {})}


def answer(line: BatchLine, output: RequestOutput, model: str) -> dict[str, Any]:
    """The line of the output file for an answered request."""
    produced = sum(len(each.token_ids) for each in output.outputs)
    prompt = len(output.prompt_token_ids)
    body = {
        "object": "chat.completion" if line.is_chat else "text_completion",
        "model": model,
        "choices": [_choice(line, each) for each in output.outputs],
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


def _choice(line: BatchLine, output: CompletionOutput) -> dict[str, Any]:
    text = {"message": {"role": "assistant", "content": output.text}} if line.is_chat else {"text": output.text}
    choice: dict[str, Any] = {"index": output.index, **text, "finish_reason": output.finish_reason}
    if output.stop_reason is not None:
        choice["stop_reason"] = output.stop_reason
    if output.logprobs is not None:
        choice["logprobs"] = {
            "tokens": [next(iter(each.values())).decoded_token for each in output.logprobs],
            "token_logprobs": [next(iter(each.values())).logprob for each in output.logprobs],
            "top_logprobs": [
                {str(one.decoded_token): one.logprob for one in each.values()} for each in output.logprobs
            ],
        }
    return choice

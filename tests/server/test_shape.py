"""Large bodies: what is long because of its text is served, what is made of too many values is refused unparsed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagemill.errors import RequestError
from pagemill.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from pagemill.server.shape import MAX_IDS

MESSAGE = {"role": "user", "content": "hi"}
PART = {"type": "text", "text": "hi"}
TEXT = 'She said: "1, 2, {3}", and \\ left.\n'
KINDS: list[tuple[type[Any], dict[str, Any], str]] = [
    (CompletionRequest, {"prompt": [7] * (MAX_IDS + 1)}, "prompt"),
    (CompletionRequest, {"prompt": [[7] * 1000] * 1000}, "prompt"),
    (CompletionRequest, {"prompt": ["a"] * 70_000}, "prompt"),
    (CompletionRequest, {"prompt": ["a", *range(300_000)]}, "values"),
    (CompletionRequest, {"prompt": [*range(300_000), "a, b"]}, "values"),
    (CompletionRequest, {"prompt": [*range(200_000), -1]}, "prompt"),
    (CompletionRequest, {"prompt": [*range(200_000), 1.5]}, "prompt"),
    (CompletionRequest, {"prompt": [*range(200_000), True]}, "prompt"),
    (CompletionRequest, {"prompt": [[1], [2] * 300, "a"]}, "prompt"),
    (CompletionRequest, {"prompt": [[1], [2] * 300, ["a"]]}, "prompt"),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 300}, "stop_token_ids"),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": [[1]] * 300}, "stop_token_ids"),
    (CompletionRequest, {"prompt": "a", "logit_bias": {f"k{i}": "x" for i in range(5000)}}, "schema"),
    (CompletionRequest, {"prompt": "a"} | {f"k{i}": 1 for i in range(50_000)}, "beside its prompt"),
    (ChatCompletionRequest, {"messages": [MESSAGE] * 5000}, "messages"),
    (ChatCompletionRequest, {"messages": [MESSAGE | {"content": [PART] * 30_000}]}, "messages"),
    (ChatCompletionRequest, {"messages": [MESSAGE], "tools": [{"type": "function"}] * 20_000}, "beside its prompt"),
    (ChatCompletionRequest, {"messages": [MESSAGE], "documents": [{"a": 1}] * 20_000}, "documents"),
    (
        ChatCompletionRequest,
        {"messages": [MESSAGE], "chat_template_kwargs": {"a": [[1]] * 90_000}},
        "beside its prompt",
    ),
    (DetokenizeRequest, {"tokens": [7] * (MAX_IDS + 1)}, "tokens"),
]


@pytest.mark.parametrize(("kind", "body", "part"), KINDS, ids=lambda value: str(value)[:40])
def test_what_is_made_of_too_many_or_wrong_values_is_refused_by_name(
    kind: type[Any], body: dict[str, Any], part: str
) -> None:
    with pytest.raises(RequestError, match=part) as refused:
        parse(kind, json.dumps(body).encode())
    assert len(str(refused.value)) < 400


def test_quotes_escaped_to_be_counted_less_do_not_hide_what_they_close() -> None:
    body = json.dumps({"prompt": ["\\"] * 200_000})
    with pytest.raises(RequestError, match="strings"):
        parse(CompletionRequest, body.encode())


@pytest.mark.parametrize(
    "body", [b"[" * 200_000, b'{"prompt": ' + b"[" * 200_000, b'"' + b"a" * 100_000, b" " * 100_000]
)
def test_a_large_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="JSON"):
        parse(CompletionRequest, body)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": TEXT * 100_000}),
        (CompletionRequest, {"prompt": list(range(MAX_IDS))}),
        (CompletionRequest, {"prompt": [list(range(8000))] * 32}),
        (CompletionRequest, {"prompt": [TEXT * 50] * 2000}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": TEXT * 30}] * 4000}),
        (ChatCompletionRequest, {"messages": [MESSAGE | {"content": [PART | {"text": TEXT * 2000}] * 40}]}),
        (ChatCompletionRequest, {"messages": [MESSAGE], "documents": [{"text": TEXT * 1000}] * 60}),
        (ChatCompletionRequest, {"messages": [MESSAGE], "tools": [{"function": {"description": TEXT * 20}}] * 128}),
        (TokenizeRequest, {"prompt": TEXT * 100_000}),
        (DetokenizeRequest, {"tokens": list(range(100_000))}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_large_because_of_its_text_is_read_as_it_is(kind: type[Any], body: dict[str, Any]) -> None:
    asked = parse(kind, json.dumps(body).encode())
    for name, value in body.items():
        found = getattr(asked, name)
        if name == "messages":
            found = [message.model_dump(exclude_none=True) for message in found]
        assert found == value

"""Requests made to hurt: each is refused or served, the next one is served, and nothing stays behind."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import httpx
import pytest

from pagemill.config import ServerConfig
from tests.server.conftest import Served
from tests.server.test_lifecycle import eventually

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def completion(more: str) -> bytes:
    return b'{"prompt": "a", "max_tokens": 2, ' + more.encode() + b"}"


@pytest.mark.parametrize(
    "body",
    [
        completion('"temperature": 1e999'),
        completion('"presence_penalty": -1e999'),
        completion('"repetition_penalty": Infinity'),
        completion('"repetition_penalty": 1e308'),
        completion('"logit_bias": {"5": NaN}'),
        completion('"max_tokens": 9223372036854775808'),
        completion('"n": 1' + "0" * 5000),
        completion('"unknown": 1' + "0" * 5000),
        completion('"unknown": ' + '{"a":' * 5000 + "1" + "}" * 5000),
        completion(r'"stop": ["\ud800"]'),
        completion(r'"user": "\ud800"'),
        completion(r'"\udc00\ud800": 1'),
        b'{"prompt": "a\xed\xa0\x80b"}',
        b'{"prompt": "a\xc0\xafb"}',
        '{"prompt": "a"}'.encode("utf-16"),
    ],
    ids=lambda body: repr(body[:50]),
)
async def test_numbers_nesting_and_text_that_are_none(served: Served, body: bytes) -> None:
    answer = await served.http.post(COMPLETIONS, content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await served.http.post(COMPLETIONS, json={"prompt": "next"})).status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "n"),
    [
        ("stop", [f"s{i}" for i in range(1001)], 1),
        ("stop", ["a" * 70_000], 1),
        ("bad_words", [f"w{i}" for i in range(1001)], 1),
        ("bad_words", ["a " * 40_000], 1),
        ("logit_bias", {str(token): 1 for token in range(3000)}, 128),
        ("allowed_token_ids", list(range(3000)), 128),
        ("stop_token_ids", list(range(3000)), 128),
    ],
)
async def test_lists_that_would_hold_up_everybody_else_are_refused(
    served: Served, field: str, value: Any, n: int
) -> None:
    answer = await served.http.post(COMPLETIONS, json={"prompt": "a", field: value, "n": n})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert "limit" in answer.json()["error"]["message"]


async def test_many_short_texts_are_tokenised_beside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = served.engine.tokenizer.encode
    threads = set()

    def noting(text: str, *, add_special_tokens: bool = True) -> list[int]:
        threads.add(threading.current_thread())
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(served.engine.tokenizer, "encode", noting)
    answer = await served.http.post(COMPLETIONS, json={"prompt": ["a" * 400] * 30, "max_tokens": 1})
    assert answer.status_code == 200
    assert threading.main_thread() not in threads


async def test_template_variables_of_any_name_reach_the_template_alone(served: Served) -> None:
    variables = {"self": 1, "source": 2, "": 3, "a b": 4, "loop": 5}
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": variables}
    assert (await served.http.post(CHAT, json=body)).status_code == 200


async def test_clients_that_vanish_in_the_middle_of_anything(served: Served) -> None:
    body = b'{"prompt": ["a", "b"], "stream": true, "n": 2, "max_tokens": 100}'
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    chance = random.Random(7)

    async def vanish() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
        writer.write(request[: chance.randrange(len(request) + 40)])
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        writer.transport.abort()

    for _ in range(5):
        await asyncio.gather(*(vanish() for _ in range(40)))
    assert (await served.http.get("/health")).status_code == 200
    assert (await served.http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
    await eventually(lambda: not served.engine.running and served.app.context.admission.open == 0)


async def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    body = b'{"prompt": "a", "stream": true}'
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    writer.write((post + b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n") * 3)
    for _ in range(3):
        await reader.readuntil(b"[DONE]")
        await reader.readuntil(b'"version"')
    writer.close()


def test_idle_connections_outlive_those_of_proxies() -> None:
    assert ServerConfig().timeout_keep_alive > 90


async def test_half_a_request_holds_up_nobody(served: Served) -> None:
    port = int(served.url.rsplit(":", 1)[1])
    writers = []
    for number in range(100):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{"[: 20 + number])
        writers.append(writer)
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as other:
        assert (await other.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
    for writer in writers:
        writer.close()

"""The log of requests: one line of JSON each, no content unless asked for, and nobody waits for whoever reads it."""

from __future__ import annotations

import io
import json
import os
import threading
from typing import Any

import pytest

from pagemill.config import ServerConfig
from pagemill.engine.caller import Caller
from pagemill.server import request_log
from pagemill.server.request_log import RequestLog
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngine
from tests.server.records import record


def written(stream: io.StringIO) -> list[Any]:
    return [json.loads(line) for line in stream.getvalue().split("\n") if line]


def test_a_finished_request_is_one_line_with_ids_times_counts_and_reasons() -> None:
    stream = io.StringIO()
    log = RequestLog(stream, "the-model")
    log.finished(record())
    log.close()
    (line,) = written(stream)
    assert line == {
        "event": "request",
        "time": "2023-11-14T22:13:30.500Z",
        "id": "chatcmpl-1",
        "route": "/v1/chat/completions",
        "key": "alice",
        "client": "127.0.0.1",
        "model": "the-model",
        "stream": True,
        "n": 2,
        "prompt_tokens": 11,
        "cached_tokens": 8,
        "completion_tokens": 14,
        "finish_reasons": ["stop", "length"],
        "error": None,
        "preemptions": 1,
        "queue_s": 0.5,
        "first_token_s": 1.0,
        "e2e_s": 2.5,
        "params": {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 0,
            "min_p": 0.0,
            "seed": 3,
            "max_tokens": 7,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        },
    }


def test_content_is_cut_and_stays_on_its_line() -> None:
    stream = io.StringIO()
    log = RequestLog(stream, "m", max_chars=9)
    log.finished(record(prompt='two\nlines "and" more', outputs=["a\u2028b\r\nc" * 9, ""]))
    log.close()
    assert stream.getvalue().count("\n") == 1
    (line,) = written(stream)
    assert line["prompt"] == "two\nlines"
    assert line["outputs"] == [("a\u2028b\r\nc" * 9)[:9], ""]


def test_a_reader_that_is_stuck_holds_up_nobody_and_is_told_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "MAX_LINES", 50)
    reading, writing = os.pipe()
    with open(writing, "w") as stream, open(reading) as reader:
        log = RequestLog(stream, "m")
        for _ in range(5000):  # more than a pipe and the queue hold
            log.finished(record())
        found: list[Any] = []
        taking = threading.Thread(target=lambda: found.extend(json.loads(line) for line in reader))
        taking.start()
        while log._lines.full():
            pass
        log.finished(record())
        log.close()
        stream.close()
        taking.join()
    lost = sum(line["lines"] for line in found if line["event"] == "lost")
    assert lost > 0
    assert lost + sum(line["event"] == "request" for line in found) == 5001


class Kept:
    def __init__(self) -> None:
        self.refusals: list[tuple[str, str, str, int]] = []

    def refused(self, caller: Caller, method: str, status: int, duration_s: float) -> None:
        assert duration_s >= 0
        self.refusals.append((caller.name, method, caller.route, status))


async def test_what_is_refused_is_told_with_its_status_and_who_asked(served: Served) -> None:
    kept = served.app.context.log = Kept()
    await served.http.post("/v1/completions", json={"prompt": ""})
    await served.http.post("/v1/completions", json={"prompt": "a"})
    await served.http.get("/none")
    assert kept.refusals == [("", "POST", "/v1/completions", 400), ("", "GET", "/none", 404)]


async def test_a_wrong_key_is_told_without_the_key_and_a_right_one_by_its_name() -> None:
    async with serving(FakeEngine(), ServerConfig(api_key=("right",))) as served:
        kept = served.app.context.log = Kept()
        for key in ("wrong", "right"):
            headers = {"authorization": f"Bearer {key}"}
            await served.http.post("/v1/completions", json={"prompt": ""}, headers=headers)
        (_, _, _, first), (name, _, _, second) = kept.refusals
        assert (first, second) == (401, 400)
        assert name.startswith("key-")


async def test_the_trace_context_is_kept_only_where_traces_are_wanted(served: Served) -> None:
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    for wanted in (False, True):
        served.app.context.traces = wanted
        await served.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert [dict(caller.trace) for caller in served.engine.callers] == [{}, headers]

"""The whole: ``pagemill serve`` on a tiny checkpoint, its engine in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pagemill.cli import main
from pagemill.server.run import bind
from tests.models.tiny import tiny_llama
from tests.server.process import ServeProcess, serve_process

FLAGS = ("--dtype", "float32", "--max-model-len", "128", "--num-gpu-blocks-override", "256", "--num-threads", "1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Iterator[ServeProcess]:
    with serve_process(str(checkpoint), "--served-model-name", "tiny", *FLAGS) as running:
        yield running


def gauge(running: ServeProcess, name: str) -> float:
    for line in httpx.get(running.url + "/metrics").text.splitlines():
        if line.startswith(name + "{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


def client(running: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=60)


def test_it_says_where_it_is_and_how_to_ask(shared: ServeProcess) -> None:
    assert "curl" in shared.said
    assert "/v1/chat/completions" in shared.said


def test_the_synchronous_client_completes_and_chats(shared: ServeProcess) -> None:
    with client(shared) as asking:
        completion = asking.completions.create(model="tiny", prompt="the quick", max_tokens=8, temperature=0)
        assert completion.usage is not None
        assert completion.usage.completion_tokens <= 8
        chat = asking.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "the lazy dog"}], max_tokens=8, temperature=0
        )
        assert chat.choices[0].finish_reason in {"stop", "length"}


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 5},
        {"temperature": 1, "seed": 5, "n": 3},
        {"temperature": 1.5, "seed": 1, "top_k": 20, "repetition_penalty": 1.2, "logprobs": 3},
        {"temperature": 0, "echo": True, "logprobs": 2},
        {"temperature": 1, "seed": 9, "stop": ["e", "qu"], "ignore_eos": True},
        {"temperature": 1, "seed": 9, "stop": ["th"], "include_stop_str_in_output": True},
        {"temperature": 1, "seed": 3, "skip_special_tokens": False, "ignore_eos": True},
    ],
    ids=str,
)
def test_a_stream_says_what_the_whole_answer_says(shared: ServeProcess, extra: dict[str, Any]) -> None:
    body = {"prompt": ["the quick brown", "fox Grüße"], "max_tokens": 40, **extra}
    with httpx.Client(base_url=shared.url, timeout=60) as http:
        whole = http.post("/v1/completions", json=body).json()
        streamed = http.post("/v1/completions", json=body | {"stream": True}).text
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    logprobs: dict[int, list[float]] = {}
    for event in streamed.removesuffix("data: [DONE]\n\n").split("\n\n"):
        for choice in json.loads(event.removeprefix("data: "))["choices"] if event else []:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                assert index not in reasons
                reasons[index] = choice["finish_reason"]
            if choice["logprobs"]:
                logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
    for choice in whole["choices"]:
        index = choice["index"]
        assert texts[index] == choice["text"]
        assert reasons[index] == choice["finish_reason"]
        if choice["logprobs"]:
            told = choice["logprobs"]["token_logprobs"]
            # Which rows share a step may differ, and the reference ops' sums with it.
            assert logprobs[index] == [value and pytest.approx(value, rel=1e-4) for value in told]
            if not body.get("stop"):
                assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


async def test_sixty_four_at_once_complete_and_leave_no_block_behind(shared: ServeProcess) -> None:
    async with openai.AsyncOpenAI(base_url=shared.url + "/v1", api_key="none", max_retries=0, timeout=120) as asking:

        async def ask(number: int) -> int:
            stream = number % 2 == 0
            prompt = list(range(5, 5 + 10 + number % 40))
            options: dict[str, Any] = {"max_tokens": 4 + number % 30, "extra_body": {"ignore_eos": True}}
            if not stream:
                answer = await asking.completions.create(model="tiny", prompt=prompt, **options)
                assert answer.usage is not None
                return answer.usage.completion_tokens
            chunks = await asking.completions.create(
                model="tiny", prompt=prompt, stream=True, stream_options={"include_usage": True}, **options
            )
            usage = [chunk.usage async for chunk in chunks][-1]
            assert usage is not None
            return usage.completion_tokens

        produced = await asyncio.gather(*map(ask, range(64)))
    assert produced == [4 + number % 30 for number in range(64)]
    assert gauge(shared, "vllm:num_requests_running") == 0
    assert gauge(shared, "vllm:kv_cache_usage_perc") == 0


def test_a_prompt_past_the_context_is_refused_with_the_numbers(shared: ServeProcess) -> None:
    with client(shared) as asking:
        with pytest.raises(openai.BadRequestError, match="128"):
            asking.completions.create(model="tiny", prompt=[5] * 200, max_tokens=1)
        with pytest.raises(openai.BadRequestError, match="120"):
            asking.completions.create(model="tiny", prompt=[5] * 120, max_tokens=20)
        asking.completions.create(model="tiny", prompt=[5] * 120, max_tokens=8)


async def test_clients_that_vanish_free_their_blocks(shared: ServeProcess) -> None:
    async with httpx.AsyncClient(base_url=shared.url, timeout=60) as http:
        for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}, {"prompt": ["a", "b"], "n": 4}):
            whole = body | {"max_tokens": 100, "ignore_eos": True}
            task = asyncio.create_task(http.post("/v1/completions", json=whole))
            await asyncio.sleep(0)
            task.cancel()
        async with asyncio.timeout(30):
            while gauge(shared, "vllm:num_requests_running") or gauge(shared, "vllm:kv_cache_usage_perc"):  # noqa: ASYNC110
                await asyncio.sleep(0)


def test_sigterm_drains_and_exits_0(checkpoint: Path) -> None:
    with serve_process(str(checkpoint), *FLAGS) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        body = {"prompt": "a", "stream": True, "max_tokens": 120, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert '"finish_reason":"length"' in rest[-4]
        assert running.process.wait(30) == 0


def test_requests_are_logged_as_lines_of_json_without_content(checkpoint: Path) -> None:
    flags = [*FLAGS, "--enable-log-requests", "--api-key", "secret-key"]
    with serve_process(str(checkpoint), *flags) as running:
        with httpx.Client(base_url=running.url, headers={"authorization": "Bearer secret-key"}, timeout=60) as http:
            asked = {"prompt": "over the lazy dog", "max_tokens": 3, "ignore_eos": True}
            assert http.post("/v1/completions", json=asked).status_code == 200
            assert http.post("/v1/completions", json={"prompt": ""}).status_code == 400
            assert http.get("/v1/models", headers={"authorization": "Bearer wrong-key"}).status_code == 401
        running.process.send_signal(signal.SIGTERM)
        assert running.process.stdout is not None
        text = running.process.stdout.read()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["event"], line.get("status")) for line in lines] == [
        ("request", None), ("refused", 400), ("refused", 401),
    ]  # fmt: skip
    assert lines[0]["finish_reasons"] == ["length"]
    assert lines[0]["prompt_tokens"] > 0
    assert lines[0]["completion_tokens"] == 3
    assert lines[0]["id"].startswith("cmpl-")
    assert "lazy" not in text
    assert "secret-key" not in text
    assert "wrong-key" not in text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_sigterm_without_patience_ends_open_streams_with_an_error(checkpoint: Path, path: str) -> None:
    flags = [*FLAGS, "--shutdown-timeout", "0"]
    with serve_process(str(checkpoint), *flags) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
        body = {**asked, "stream": True, "max_tokens": 80, "ignore_eos": True, "n": 64}
        with http.stream("POST", path, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert "shut down" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
        assert "abort" not in "".join(rest)
        assert running.process.wait(30) == 0


def test_sigterm_without_patience_answers_open_requests_503(checkpoint: Path) -> None:
    flags = [*FLAGS, "--shutdown-timeout", "0"]
    with serve_process(str(checkpoint), *flags) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        body = {"prompt": "a", "max_tokens": 120, "ignore_eos": True, "n": 128}
        with ThreadPoolExecutor() as threads:
            whole = threads.submit(httpx.post, running.url + "/v1/completions", json=body, timeout=60)
            deadline = time.monotonic() + 60
            while not re.search(r"^vllm:num_requests_running\{.*\} [1-9]", http.get("/metrics").text, re.MULTILINE):
                assert time.monotonic() < deadline
            running.process.send_signal(signal.SIGTERM)
            answer = whole.result()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "shut down" in answer.json()["error"]["message"]
        assert running.process.wait(30) == 0


def test_a_killed_engine_is_reported_and_started_again(checkpoint: Path) -> None:
    with serve_process(str(checkpoint), *FLAGS) as running, httpx.Client(base_url=running.url, timeout=60) as http:
        body = {"prompt": "a", "stream": True, "max_tokens": 120, "ignore_eos": True, "n": 64}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(running.engine_pid, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "service_unavailable_error"
        down = http.get("/health")
        assert down.status_code == 503
        assert "SIGKILL" in down.json()["error"]["message"]
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        deadline = time.monotonic() + 60
        while http.get("/health").status_code != 200:
            assert time.monotonic() < deadline
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4}).status_code == 200


def test_a_port_in_use_is_one_line_before_any_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "no/such/model", "--port", str(port)]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert str(port) in shown
    assert "--port" in shown


async def test_small_parts_of_an_answer_do_not_wait_for_each_other() -> None:
    """Whatever event loop runs: without uvloop each answer on a connection that is kept waited for 40 ms."""
    delayed: list[int] = []

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        delayed.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 0)
        writer.close()

    listener = bind("127.0.0.1", 0)
    async with await asyncio.start_server(answer, sock=listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        await reader.read()
        writer.close()
    assert delayed == [False]


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pagemill", "serve", str(tmp_path / "none"), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.strip().count("\n") == 0, ended.stderr
    assert "none" in ended.stderr

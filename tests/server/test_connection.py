"""What comes over a connection before a request is whole, and what happens to it: raw sockets, hostile and clumsy."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from pagemill.config import ServerConfig
from pagemill.errors import ConfigError
from pagemill.server import connection, listen
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngine
from tests.server.test_lifecycle import eventually

BODY = b'{"prompt": "a"}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
GET = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


async def connect(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))


async def answer_to(served: Served, sent: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of the only answer; the server closes."""
    reader, writer = await connect(served)
    writer.write(sent)
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lines = head.strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:])
    body = await reader.readexactly(int(headers["content-length"]))
    assert await reader.read() == b""
    writer.close()
    return int(lines[0].split()[1]), headers, json.loads(body)


@pytest.mark.parametrize(
    ("sent", "status", "part"),
    [
        (b"nonsense\r\n\r\n", 400, "HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, "HTTP"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "HTTP"),
        (b"GET /health HTTP/9.9\r\n\r\n", 400, "HTTP"),
        (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400, "HTTP"),
        (b"GET /health HTTP/1.1\r\na: b\x00c\r\n\r\n", 400, "HTTP"),
        (b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n", 400, "HTTP"),
        (b"CONNECT other.test:443 HTTP/1.1\r\nhost: x\r\n\r\n", 400, "HTTP"),
        (b"POST /tokenize HTTP/1.1\r\ncontent-length: -5\r\n\r\n", 400, "HTTP"),
        (b"POST /tokenize HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcde", 400, "HTTP"),
        (b"POST /tokenize HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", 400, "HTTP"),
        (b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400, "HTTP"),
        (b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n", 400, "HTTP"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414, "8192"),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 70_000 + b"\r\n\r\n", 431, "--h11-max-incomplete-event-size"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431, "--h11-max-header-count"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300, 431, "--h11-max-header-count"),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 1_000_000, 431, "--h11-max-incomplete-event-size"),
        (
            b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n" + b"t: v\r\n" * 300,
            431,
            "--h11-max-header-count",
        ),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else "",
)
async def test_what_is_no_request_is_refused_in_openais_format(
    served: Served, sent: bytes, status: int, part: str
) -> None:
    told, headers, body = await answer_to(served, sent)
    assert told == status
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert part in body["error"]["message"]
    assert body["error"]["code"] is None
    assert (await served.http.get("/health")).status_code == 200


async def test_trailers_of_a_body_are_no_headers(served: Served) -> None:
    async with serving(FakeEngine(), ServerConfig(api_key=("first",))) as locked:
        sent = b"POST /tokenize HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        sent += b"f\r\n" + BODY + b"\r\n0\r\nauthorization: Bearer first\r\n\r\n"
        assert (await answer_to(locked, sent))[0] == 401


async def test_a_request_to_speak_another_protocol_is_answered_in_this_one(served: Served) -> None:
    upgrade = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    for request in (GET, POST):
        line, rest = request.split(b"\r\n", 1)
        reader, writer = await connect(served)
        writer.write(line + b"\r\n" + upgrade + rest + GET)
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b"HTTP/1.1 200")
        await reader.readuntil(b'"version"')
        writer.close()


async def test_nonsense_after_a_request_does_not_spoil_its_answer(served: Served) -> None:
    served.engine.gate.clear()
    reader, writer = await connect(served)
    writer.write(POST)
    await eventually(lambda: served.engine.running)
    writer.write(b"nonsense\r\n\r\n")
    await eventually(lambda: next(iter(_connections(served)))._deaf)
    served.engine.gate.set()
    answer = await reader.read()
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"Hello, world." in answer
    writer.close()


async def test_nor_those_of_the_requests_in_line_before_it(served: Served) -> None:
    reader, writer = await connect(served)
    writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" + POST + b"nonsense\r\n\r\n")
    answer = await reader.read()
    assert answer.count(b"HTTP/1.1 200") == 2
    assert b"Hello, world." in answer
    writer.close()


def _connections(served: Served) -> set[connection.Connection]:
    found: set[connection.Connection] = served.server.server_state.connections  # type: ignore[assignment]
    return found


@pytest.mark.parametrize(
    ("sent", "part"), [(b"GET /hea", "head"), (GET[:-2], "head"), (POST[:-3], "body"), (POST[: -len(BODY)], "body")]
)
async def test_a_sender_that_never_finishes_is_told_so(sent: bytes, part: str) -> None:
    async with serving(FakeEngine(), ServerConfig(timeout_read=0.05)) as served:
        status, _, body = await answer_to(served, sent)
        assert status == 408
        assert f"{part} did not arrive" in body["error"]["message"]
        assert body["error"]["type"] == "timeout_error"
        await eventually(lambda: not _connections(served))


async def test_a_body_that_drips_past_its_time_is_cut_although_bytes_come() -> None:
    async with serving(FakeEngine(), ServerConfig(timeout_read=0.1)) as served:
        reader, writer = await connect(served)
        writer.write(POST[: -len(BODY)].replace(b"length: ", b"length: 9999"))

        async def drip() -> None:
            while not writer.is_closing():
                writer.write(b" ")
                await asyncio.sleep(0.001)

        dripping = asyncio.create_task(drip())
        assert b" 408 " in await reader.readline()
        dripping.cancel()
        writer.close()


async def test_a_connection_on_which_nothing_comes_is_closed() -> None:
    async with serving(FakeEngine(), ServerConfig(timeout_read=0.05)) as served:
        reader, writer = await connect(served)
        assert await reader.read() == b""
        writer.close()


async def test_a_request_refused_early_does_not_stay_open_for_its_body() -> None:
    async with serving(FakeEngine(), ServerConfig(timeout_read=0.1, api_key=("first",))) as served:
        reader, writer = await connect(served)
        writer.write(POST[:-3])
        answer = await reader.read()
        assert answer.count(b"HTTP/1.1") == 1
        assert answer.startswith(b"HTTP/1.1 401")
        writer.close()


async def test_a_connection_is_usable_after_a_request_that_was_refused_before_it_was_whole() -> None:
    async with serving(FakeEngine(), ServerConfig(api_key=("first",))) as served:
        reader, writer = await connect(served)
        writer.write(POST[:-3])
        assert b" 401 " in await reader.readuntil(b"Bearer KEY'")
        writer.write(POST[-3:] + GET.replace(b"host", b"authorization: Bearer first\r\nhost"))
        await reader.readuntil(b'"version"')
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_is_aborted_and_answered_504(stream: bool) -> None:
    async with serving(FakeEngine(), ServerConfig(request_timeout=0.1)) as served:
        served.engine.gate.clear()
        answer = await served.http.post("/v1/completions", json={"prompt": "a", "stream": stream})
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout_error"
        assert not served.engine.running
        assert served.engine.aborted
        await eventually(lambda: served.app.context.admission.open == 0)
        served.engine.gate.set()
        assert (await served.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_a_stream_that_takes_too_long_ends_with_an_error_event() -> None:
    async with serving(FakeEngine(), ServerConfig(request_timeout=0.3)) as served:
        body = {"prompt": "a", "stream": True}
        async with served.http.stream("POST", "/v1/completions", json=body) as answer:
            events = []
            async for line in answer.aiter_lines():
                served.engine.gate.clear()
                events += [line] if line else []
        assert answer.status_code == 200
        assert events[-1] == "data: [DONE]"
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert "--request-timeout" in error["message"]
        assert not served.engine.running


async def test_for_one_connection_too_many_the_one_idle_longest_goes() -> None:
    async with serving(FakeEngine(), ServerConfig(max_connections=3)) as served:
        waiting = [await connect(served) for _ in range(3)]
        await eventually(lambda: len(_connections(served)) == 3)
        reader, writer = await connect(served)
        writer.write(GET)
        assert b" 200 " in await reader.readline()
        assert await waiting[0][0].read() == b""
        for _, each in [*waiting, (reader, writer)]:
            each.close()


async def test_where_every_connection_is_at_work_one_more_is_503() -> None:
    async with serving(FakeEngine(), ServerConfig(max_connections=2)) as served:
        served.engine.gate.clear()
        working = [await connect(served) for _ in range(2)]
        for _, writer in working:
            writer.write(POST)
        await eventually(lambda: len(served.engine.running) == 2)
        status, headers, body = await answer_to(served, b"")
        assert status == 503
        assert headers["retry-after"] == "1"
        assert "connections" in body["error"]["message"]
        served.engine.gate.set()
        for reader, writer in working:
            assert b" 200 " in await reader.readline()
            writer.close()


async def test_a_reader_that_stopped_reading_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALL_S", 0.05)
    async with serving(FakeEngine("x" * 4096, max_model_len=10**7)) as served:
        sent = json.dumps({"prompt": "a", "stream": True, "max_tokens": 10**6, "ignore_eos": True}).encode()
        reader, writer = await connect(served)
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(sent) + sent)
        await reader.readline()
        writer.transport.pause_reading()
        await eventually(lambda: not _connections(served))
        await eventually(lambda: not served.engine.running)
        writer.transport.abort()


async def test_answers_that_nobody_takes_are_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", 400_000)
    async with serving(FakeEngine("x" * 4096, max_model_len=10**7)) as served:
        sent = json.dumps({"prompt": [7] * 100_000, "max_tokens": 1, "return_token_ids": True, "n": 40}).encode()
        post = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(sent) + sent
        writers = []
        for _ in range(3):
            _, writer = await connect(served)
            writer.transport.pause_reading()
            writer.write(post)
            writers.append(writer)
        await eventually(lambda: len(served.engine.seen) == 3 and not served.engine.running)
        await eventually(lambda: sum(each._unsent for each in _connections(served)) <= 400_000)
        for writer in writers:
            writer.transport.abort()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def tls_files(authority: trustme.CA, folder: Path) -> ServerConfig:
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    with (folder / "chain.pem").open("wb") as chain:
        for part in issued.cert_chain_pems:
            chain.write(part.bytes())
    return ServerConfig(ssl_certfile=str(folder / "chain.pem"), ssl_keyfile=str(folder / "key.pem"))


async def test_tls(authority: trustme.CA, tmp_path: Path) -> None:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with serving(FakeEngine(), tls_files(authority, tmp_path)) as served:
        assert served.url.startswith("https://")
        async with httpx.AsyncClient(base_url=served.url, verify=trusting) as client:
            body = {"prompt": "a", "stream": True}
            assert "[DONE]" in (await client.post("/v1/completions", json=body)).text
        reader, writer = await connect(served)
        writer.write(GET)
        assert b"200" not in await reader.read()
        writer.close()


async def test_clients_need_a_certificate_where_the_server_asks_for_one(authority: trustme.CA, tmp_path: Path) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    files = tls_files(authority, tmp_path)
    config = ServerConfig(
        ssl_certfile=files.ssl_certfile, ssl_keyfile=files.ssl_keyfile, ssl_ca_certs=str(tmp_path / "ca.pem")
    )
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with serving(FakeEngine(), config) as served:
        async with httpx.AsyncClient(base_url=served.url, verify=trusting) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get("/version")
        authority.issue_cert("client.test").configure_cert(trusting)
        async with httpx.AsyncClient(base_url=served.url, verify=trusting) as client:
            assert (await client.get("/version")).status_code == 200


def test_a_renewed_certificate_is_taken_in_and_a_broken_one_is_not(authority: trustme.CA, tmp_path: Path) -> None:
    config = tls_files(authority, tmp_path)
    context = listen.tls_context(config)
    assert context is not None
    tls_files(authority, tmp_path)
    listen.reload_certificate(context, config)
    (tmp_path / "chain.pem").write_text("nonsense")
    listen.reload_certificate(context, config)
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        listen.tls_context(config)


@pytest.mark.parametrize(
    "config", [ServerConfig(ssl_keyfile="key.pem"), ServerConfig(ssl_ca_certs="a"), ServerConfig(ssl_certfile="none")]
)
def test_tls_without_what_it_needs_is_refused(config: ServerConfig) -> None:
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        listen.tls_context(config)

"""Requests made from the server's own schema: whatever comes, no answer is a 5xx, and each is as documented."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
import uvicorn
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from pagemill.config import ServerConfig
from pagemill.model_config import PoolingConfig
from pagemill.server.app import build_app
from tests.server.fake_engine import FakeEngine

FEW, MANY = 25, 200


POOLED = ("/v1/embeddings", "/v1/rerank", "/v1/score")
POOLING = {"pools": PoolingConfig(kind="mean"), "scores": PoolingConfig(kind="cls", num_scores=1)}


@pytest.fixture(scope="module", params=["generates", *POOLING])
def address(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Of a server whose model generates, embeds, or scores pairs; with that word."""
    listener = socket.create_server(("127.0.0.1", 0))
    server: uvicorn.Server | None = None

    async def run() -> None:
        nonlocal server
        app = build_app(FakeEngine(pooling=POOLING.get(request.param)), ServerConfig())
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, ws="none"))
        await server._serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    yield request.param, f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert server is not None
    server.should_exit = True
    thread.join()
    listener.close()


def fuzz(address: tuple[str, str], num_cases: int) -> None:
    """Every route of a server that generates; of the others, those that answer there only."""
    kind, url = address
    schema = schemathesis.openapi.from_url(url + "/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        if kind in POOLING and operation.path not in POOLED:
            continue

        @hypothesis.settings(
            max_examples=num_cases,
            deadline=None,
            derandomize=True,  # the same cases each time: see test_no_input_hangs.py
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy())
        def send(case: schemathesis.Case) -> None:
            answer = case.call()
            checks = [not_a_server_error, status_code_conformance, content_type_conformance]
            if not answer.headers["content-type"][0].startswith("text/event-stream"):
                checks.append(response_schema_conformance)  # of events: tests/server/test_openai_schema.py
            case.validate_response(answer, checks=checks)

        send()


def test_no_case_is_a_server_error(address: tuple[str, str]) -> None:
    fuzz(address, FEW)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_case_of_many_is_a_server_error(address: tuple[str, str]) -> None:
    fuzz(address, MANY)

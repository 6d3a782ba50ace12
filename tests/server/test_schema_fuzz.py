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
from pagemill.server.app import build_app
from tests.server.fake_engine import FakeEngine

FEW, MANY = 25, 2000


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server: uvicorn.Server | None = None

    async def run() -> None:
        nonlocal server
        app = build_app(FakeEngine(), ServerConfig())
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, ws="none"))
        await server._serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert server is not None
    server.should_exit = True
    thread.join()
    listener.close()


def fuzz(address: str, num_cases: int) -> None:
    schema = schemathesis.openapi.from_url(address + "/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()

        @hypothesis.settings(
            max_examples=num_cases, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        @hypothesis.given(case=operation.as_strategy())
        def send(case: schemathesis.Case) -> None:
            answer = case.call()
            checks = [not_a_server_error, status_code_conformance, content_type_conformance]
            if not answer.headers["content-type"][0].startswith("text/event-stream"):
                checks.append(response_schema_conformance)  # of events: tests/server/test_openai_schema.py
            case.validate_response(answer, checks=checks)

        send()


def test_no_case_is_a_server_error(address: str) -> None:
    fuzz(address, FEW)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_case_of_many_is_a_server_error(address: str) -> None:
    fuzz(address, MANY)

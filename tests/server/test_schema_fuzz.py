"""Requests made from the server's own schema: whatever comes, no answer is a 5xx, and each is as documented.

Most random bodies are refused for their first wrong field, and what lies behind would never be tried. So what is
refused is sent again without the field that the error names, and every second id is one that exists.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator

import hypothesis
import pytest
import requests
import schemathesis
import uvicorn
from schemathesis.checks import not_a_server_error
from schemathesis.core.transport import Response
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from pagemill.config import ServerConfig
from pagemill.model_config import PoolingConfig
from pagemill.server.app import build_app
from pagemill.server.run import bind
from tests.server.conftest import REQUEST_TIMEOUT_S
from tests.server.fake_engine import FakeEngine

FEW, MANY = 25, 500
MOST_REPAIRS = 6
"""Fields that are taken out of one refused body."""

POOLED = ("/v1/embeddings", "/v1/rerank", "/v1/score", "/pooling", "/classify")
ALIASES = ("/rerank", "/v2/rerank", "/score")
POOLING = {"pools": PoolingConfig(kind="mean"), "scores": PoolingConfig(kind="cls", num_scores=1)}

NEEDED = {
    "prompt": "a",
    "messages": [{"role": "user", "content": "a"}],
    "input": "a",
    "tokens": [97],
    "query": "a",
    "documents": ["a"],
    "text_1": "a",
    "text_2": "a",
}
"""What stands in for a field that a body cannot do without."""


@pytest.fixture(scope="module", params=["generates", *POOLING])
def address(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Of a server whose model generates, embeds, or scores pairs; with that word."""
    listener = bind("127.0.0.1", 0)
    listener.listen()
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


class Sender:
    """Sends cases over one connection and checks every answer."""

    def __init__(self, url: str, session: requests.Session) -> None:
        self._url = url
        self._session = session
        self._turn = itertools.cycle([False, True])

    def send(self, case: schemathesis.Case) -> None:
        """A case, and what becomes of it without the fields that are refused."""
        if "response_id" in case.path_parameters and next(self._turn):
            case.path_parameters["response_id"] = self._stored()
        for _ in range(MOST_REPAIRS):
            answer = self._checked(case)
            if answer.status_code < 400 or not self._repair(case, answer.json()["error"]["param"]):
                return
        self._checked(case)

    def _stored(self) -> str:
        body = {"input": "a", "max_output_tokens": 1}
        answer = self._session.post(self._url + "/v1/responses", json=body, timeout=REQUEST_TIMEOUT_S)
        identifier: str = answer.json().get("id", "none")  # a model that pools answers nothing
        return identifier

    def _checked(self, case: schemathesis.Case) -> Response:
        answer = case.call(session=self._session, timeout=REQUEST_TIMEOUT_S)
        checks = [not_a_server_error, status_code_conformance, content_type_conformance]
        if answer.headers["content-type"][0].startswith("text/event-stream"):
            # What an event is made of: tests/server/test_openai_schema.py.
            assert '"type":"server_error"' not in answer.text
        else:
            checks.append(response_schema_conformance)
        case.validate_response(answer, checks=checks)
        return answer

    def _repair(self, case: schemathesis.Case, param: str | None) -> bool:
        """Whether the field could be taken out, or be given a value that will do."""
        field = (param or "").split(".")[0].split("[")[0]
        if not isinstance(case.body, dict) or not field or case.body.get(field) == NEEDED.get(field, object()):
            return False
        body = {name: value for name, value in case.body.items() if name != field}
        if field in NEEDED:
            body[field] = NEEDED[field]
        elif len(body) == len(case.body):
            return False
        case.body = body
        return True


def fuzz(address: tuple[str, str], num_cases: int, num_elsewhere: int) -> None:
    """Every route where it belongs: those that pool on servers that do, all others on one that generates."""
    kind, url = address
    schema = schemathesis.openapi.from_url(url + "/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        belongs = operation.path not in ALIASES and (operation.path in POOLED) == (kind in POOLING)
        count = num_cases if belongs else num_elsewhere
        if count:
            with requests.Session() as session:
                fuzz_operation(operation, count, Sender(url, session))


def fuzz_operation(operation: schemathesis.schemas.APIOperation, count: int, sender: Sender) -> None:
    """The same cases each time: see test_no_input_hangs.py."""

    @hypothesis.settings(
        max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(case=operation.as_strategy())
    def send(case: schemathesis.Case) -> None:
        sender.send(case)

    send()


def test_no_case_is_a_server_error(address: tuple[str, str]) -> None:
    fuzz(address, FEW, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_case_of_many_is_a_server_error(address: tuple[str, str]) -> None:
    fuzz(address, MANY, FEW)

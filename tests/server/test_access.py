"""API keys: denied by default on every route but the probes."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator

import openai
import pytest

from pagemill.config import ServerConfig
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngine

CLOSED = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake/model"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("GET", "/page/page.js"),
    ("POST", "/invocations"),
    ("POST", "/pooling"),
    ("POST", "/v2/embed"),
    ("GET", "/no/such/path"),
    ("GET", "//health"),
    ("GET", "/health/"),
    ("GET", "/Health"),
]


@pytest.fixture
async def locked() -> AsyncIterator[Served]:
    async with serving(FakeEngine(), ServerConfig(api_key=("first", "second"))) as served:
        yield served


@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_without_a_key_nothing_is_open(locked: Served, method: str, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer"}, {"authorization": "first"}):
        answer = await locked.http.request(method, locked.url + path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert "www-authenticate" in answer.headers


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
async def test_probes_are_open(locked: Served, path: str) -> None:
    assert (await locked.http.get(path)).status_code == 200


@pytest.mark.parametrize("key", ["first", "second"])
async def test_any_of_the_keys_opens(locked: Served, key: str) -> None:
    client = openai.AsyncOpenAI(base_url=locked.url + "/v1", api_key=key, max_retries=0)
    async with client:
        assert (await client.models.list()).data[0].id == "fake/model"
    bad = openai.AsyncOpenAI(base_url=locked.url + "/v1", api_key=key + "x", max_retries=0)
    async with bad:
        with pytest.raises(openai.AuthenticationError):
            await bad.models.list()


async def test_a_browser_sends_the_key_as_a_password_but_not_for_other_sites(locked: Served) -> None:
    basic = {"authorization": "Basic " + base64.b64encode(b"anyone:second").decode()}
    assert (await locked.http.get("/", headers=basic)).status_code == 200
    host = locked.url.removeprefix("http://")
    same = await locked.http.post("/tokenize", json={"prompt": "a"}, headers=basic | {"origin": f"http://{host}"})
    assert same.status_code == 200
    other = await locked.http.post("/tokenize", json={"prompt": "a"}, headers=basic | {"origin": "http://evil.test"})
    assert other.status_code == 401
    broken = await locked.http.get("/", headers={"authorization": "Basic %%%"})
    assert broken.status_code == 401
    assert broken.headers["www-authenticate"].startswith("Basic")


async def test_without_keys_configured_all_is_open(served: Served) -> None:
    assert (await served.http.get("/v1/models")).status_code == 200

"""API keys, tenants and other sites' pages: denied by default on every route but the probes."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator

import openai
import pytest
from starlette.routing import Route

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


async def test_every_route_of_the_application_but_the_probes_is_closed(locked: Served) -> None:
    routes = [route for route in locked.app._app.routes if isinstance(route, Route)]  # type: ignore[attr-defined]
    assert len(routes) > 10
    for route in routes:
        path = re.sub(r"{[^}]*}", "x", route.path)
        for method in route.methods or ():
            answer = await locked.http.request(method, path)
            expected = {200} if path in {"/health", "/ready", "/ping"} else {401}
            assert {answer.status_code} == expected, f"{method} {path}"


@pytest.mark.parametrize("headers", [[("authorization", "Bearer first"), ("authorization", "Bearer wrong")]])
async def test_two_keys_in_one_request_are_none(locked: Served, headers: list[tuple[str, str]]) -> None:
    for given in (headers, headers[::-1]):
        assert (await locked.http.get("/v1/models", headers=given)).status_code == 401


async def test_requests_with_different_keys_share_no_prefixes(locked: Served) -> None:
    for key in ("first", "second", "first"):
        headers = {"authorization": f"Bearer {key}"}
        await locked.http.post("/v1/completions", json={"prompt": ["a", "b"]}, headers=headers)
    tenants = [caller.tenant for caller in locked.engine.callers]
    assert tenants[0] == tenants[1] == tenants[4] != tenants[2]
    assert all(tenants)
    shown = str(locked.engine.callers) + str(locked.app.context.config) + str(vars(locked.app.context.keys))
    assert "first" not in shown
    assert "second" not in shown


async def test_prefixes_are_shared_between_keys_where_the_server_says_so() -> None:
    async with serving(FakeEngine(), ServerConfig(api_key=("first", "second"), share_prefix_cache=True)) as served:
        for key in ("first", "second"):
            headers = {"authorization": f"Bearer {key}"}
            await served.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert {caller.tenant for caller in served.engine.callers} == {""}


async def test_a_page_of_another_site_cannot_make_the_server_work(served: Served) -> None:
    there = {"sec-fetch-site": "cross-site", "origin": "https://evil.test", "content-type": "text/plain"}
    assert (await served.http.post("/v1/completions", json={"prompt": "a"}, headers=there)).status_code == 403
    assert not served.engine.seen
    assert (await served.http.get("/", headers=there | {"sec-fetch-mode": "navigate"})).status_code == 200
    here = {"sec-fetch-site": "same-origin", "origin": served.url}
    answer = await served.http.post("/v1/completions", json={"prompt": "a"}, headers=here)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_pages_of_allowed_origins_may_ask_and_read_even_what_was_refused() -> None:
    config = ServerConfig(api_key=("first",), allowed_origins=("https://good.test",))
    async with serving(FakeEngine(), config) as served:
        there = {"sec-fetch-site": "cross-site", "origin": "https://good.test"}
        asking = there | {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        preflight = await served.http.options("/v1/completions", headers=asking)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://good.test"
        refused = await served.http.post("/v1/completions", json={"prompt": "a"}, headers=there)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://good.test"
        key = {"authorization": "Bearer first"}
        answer = await served.http.post("/v1/completions", json={"prompt": "a"}, headers=there | key)
        assert answer.status_code == 200
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        evil = await served.http.post(
            "/v1/completions", json={"prompt": "a"}, headers=there | key | {"origin": "https://evil.test"}
        )
        assert evil.status_code == 403
        assert "access-control-allow-origin" not in evil.headers


async def test_without_keys_configured_all_is_open(served: Served) -> None:
    assert (await served.http.get("/v1/models")).status_code == 200

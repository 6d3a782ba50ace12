"""Models, metrics, version, the schema, and the page's files."""

from __future__ import annotations

import asyncio
import re

import pytest

from pagemill.config import ServerConfig
from pagemill.server.answer_schemas import BlockMapResponse, HealthResponse, ModelCard, ModelList, VersionResponse
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngine


async def test_the_model_is_listed_and_found_by_a_name_with_a_slash(served: Served) -> None:
    listed = await served.openai.models.list()
    assert [model.id for model in listed.data] == ["fake/model"]
    card = (await served.http.get("/v1/models/fake/model")).json()
    assert card["max_model_len"] == 512
    missing = await served.http.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_a_served_name_replaces_the_models_own() -> None:
    async with serving(FakeEngine(), ServerConfig(served_model_name="short")) as served:
        answer = (await served.http.post("/v1/completions", json={"prompt": "a", "model": "short"})).json()
        assert answer["model"] == "short"
        refused = await served.http.post("/v1/completions", json={"prompt": "a", "model": "fake/model"})
        assert refused.status_code == 404


async def test_answers_fit_their_schemas(served: Served) -> None:
    for path, shape in (
        ("/v1/models", ModelList),
        ("/v1/models/fake/model", ModelCard),
        ("/health", HealthResponse),
        ("/kv_blocks", BlockMapResponse),
        ("/version", VersionResponse),
    ):
        shape.model_validate_json((await served.http.get(path)).content, strict=True)


async def test_the_map_of_blocks_is_asked_for_once_however_many_watch(served: Served) -> None:
    maps = await asyncio.gather(*(served.app.context.block_map.groups() for _ in range(20)))
    assert maps == [["fffffffffc"]] * 20
    assert served.engine.calls == 1


async def test_the_map_of_a_dead_engine_is_refused_with_the_reason(served: Served) -> None:
    served.engine.state.alive = False
    answer = await served.http.get("/kv_blocks")
    assert answer.status_code == 503
    assert "starting again" in answer.json()["error"]["message"]


async def test_metrics_are_prometheus_text(served: Served) -> None:
    answer = await served.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "vllm:num_requests_running" in answer.text


async def test_the_schema_documents_every_route_with_bodies_and_answers(served: Served) -> None:
    schema = (await served.http.get("/openapi.json")).json()
    names = set(schema["components"]["schemas"])
    references = set(re.findall(r"#/components/schemas/([\w-]+)", str(schema)))
    assert references <= names
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]
            shown = set(answers["200"]["content"])
            assert shown in ({"application/json"}, {"application/json", "text/event-stream"}) or path == "/metrics"
            assert {"401", "500", "503"} <= set(answers)
            named = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path))
            if method == "post" and not named:
                assert "requestBody" in operation
    for path, chunk in (
        ("/v1/completions", "CompletionChunk"),
        ("/v1/chat/completions", "ChatCompletionChunk"),
        ("/v1/responses", "ResponseEvent"),
    ):
        events = schema["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        assert events["schema"] == {"$ref": f"#/components/schemas/{chunk}"}


async def test_the_page_needs_nothing_from_outside(served: Served) -> None:
    page = await served.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    parts = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert parts
    for part in parts:
        if part.startswith("data:"):
            continue
        answer = await served.http.get(part)
        assert answer.status_code == 200
        assert not re.search(r"https?://(?!www\.w3\.org)", answer.text), part


@pytest.mark.parametrize("name", ["../app.py", "..%2fapp.py", "none.js", "__init__.py"])
async def test_no_other_file_is_served(served: Served, name: str) -> None:
    assert (await served.http.get(f"/page/{name}")).status_code == 404


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
async def test_probes_may_ask_for_the_head_alone(served: Served, path: str) -> None:
    answer = await served.http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    served.engine.state.alive = False
    assert (await served.http.head(path)).status_code == 503
    assert "head" not in (await served.http.get("/openapi.json")).json()["paths"][path]

"""/v1/embeddings over a real socket: forms of input and output, bounds, and what goes wrong."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest

from pagemill.config import ServerConfig
from pagemill.errors import NonFiniteLogitsError
from pagemill.model_config import PoolingConfig
from pagemill.server.pooling_schema import EmbeddingResponse
from tests.server.conftest import Served, serving
from tests.server.fake_engine import BOS, FakeEngine
from tests.server.openai_spec import problems

EMBEDS = PoolingConfig(kind="mean")


@pytest.fixture
async def embedding() -> AsyncIterator[Served]:
    async with serving(FakeEngine(pooling=EMBEDS)) as running:
        yield running


def fake_vector(text: str, dimensions: int = 64) -> np.ndarray:
    counts = np.bincount(np.frombuffer(text.encode(), np.uint8) % 64, minlength=64)[:dimensions].astype(np.float64)
    return counts / np.linalg.norm(counts)


async def test_text_token_ids_and_lists_of_either(embedding: Served) -> None:
    for given, count in (("abc", 1), ([97, 98, 99], 1), (["abc", "de"], 2), ([[97, 98, 99], [100]], 2)):
        answer = await embedding.openai.embeddings.create(model="fake/model", input=given)
        assert [item.index for item in answer.data] == list(range(count))
        np.testing.assert_allclose(answer.data[0].embedding, fake_vector("abc"), atol=1e-6)
    assert embedding.engine.pooled[0].token_ids == [BOS, 97, 98, 99]
    assert embedding.engine.pooled[1].token_ids == [97, 98, 99]


async def test_an_answer_has_the_documented_shape_and_counts_tokens(embedding: Served) -> None:
    answer = await embedding.http.post("/v1/embeddings", json={"input": ["abc", "de"], "request_id": "mine"})
    shown = EmbeddingResponse.model_validate_json(answer.content, strict=True)
    assert shown.id.startswith("embd-mine-")
    assert shown.usage.prompt_tokens == shown.usage.total_tokens == 7
    assert answer.headers["x-request-id"] == shown.id
    assert problems("CreateEmbeddingResponse", answer.json()) == []


@pytest.mark.parametrize("size", [1, 63, 384, 4096])
async def test_base64_decodes_to_the_width_of_the_model(size: int) -> None:
    engine = FakeEngine(pooling=EMBEDS)
    engine.embedding_size = size
    async with serving(engine) as running:
        wide = await running.openai.embeddings.create(model="", input="hello")  # the client asks for base64
        plain = await running.openai.embeddings.create(model="", input="hello", encoding_format="float")
        raw = await running.http.post("/v1/embeddings", json={"input": "hello", "encoding_format": "base64"})
    assert len(wide.data[0].embedding) == len(plain.data[0].embedding) == size
    assert len(base64.b64decode(raw.json()["data"][0]["embedding"])) == 4 * size
    assert np.array_equal(np.float32(wide.data[0].embedding), np.float32(plain.data[0].embedding))


async def test_fewer_dimensions_are_scaled_again(embedding: Served) -> None:
    answer = await embedding.openai.embeddings.create(model="", input="hello world", dimensions=40)
    np.testing.assert_allclose(answer.data[0].embedding, fake_vector("hello world", 40), atol=1e-6)
    raw = await embedding.http.post("/v1/embeddings", json={"input": "aab", "dimensions": 40, "normalize": False})
    assert raw.json()["data"][0]["embedding"][33:35] == [2.0, 1.0]


async def test_a_model_that_does_not_normalise_is_left_alone() -> None:
    async with serving(FakeEngine(pooling=PoolingConfig(kind="mean", normalize=False))) as running:
        plain = await running.openai.embeddings.create(model="", input="aab")
        assert plain.data[0].embedding[33:35] == [2.0, 1.0]
        scaled = await running.http.post("/v1/embeddings", json={"input": "aab", "normalize": True})
    assert np.linalg.norm(scaled.json()["data"][0]["embedding"]) == pytest.approx(1.0)


async def test_truncation_keeps_the_first_tokens_and_the_special_ones(embedding: Served) -> None:
    for limit, kept in ((3, [BOS, 97, 98]), (-1, [BOS, *b"abcdef"])):
        await embedding.http.post("/v1/embeddings", json={"input": "abcdef", "truncate_prompt_tokens": limit})
        assert embedding.engine.pooled[-1].token_ids == kept
    long = await embedding.http.post("/v1/embeddings", json={"input": "a" * 999, "truncate_prompt_tokens": -1})
    assert long.json()["usage"]["prompt_tokens"] == 512
    await embedding.http.post("/v1/embeddings", json={"input": [1, 2, 3, 4], "truncate_prompt_tokens": 2})
    assert embedding.engine.pooled[-1].token_ids == [1, 2]
    await embedding.http.post("/v1/embeddings", json={"input": "ab", "add_special_tokens": False})
    assert embedding.engine.pooled[-1].token_ids == [97, 98]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "input"),
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "is empty"),
        ({"input": [[]]}, "input", "is empty"),
        ({"input": ["a", ""]}, "input", "input 1 is empty"),
        ({"input": "a" * 999}, "input", "the limit is 512"),
        ({"input": [999999]}, "input", "999999"),
        ({"input": [-1]}, "input", "input"),
        ({"input": "a", "dimensions": 65}, "dimensions", "more than this model's 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "between 1"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves nothing"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "between -1"),
        ({"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "more than this model's 512"),
        ({"input": "ab", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "no room for text"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(embedding: Served, body: dict[str, Any], param: str, words: str) -> None:
    answer = await embedding.http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == param


async def test_an_unknown_model_is_not_found(embedding: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        await embedding.openai.embeddings.create(model="other", input="a")


async def test_more_inputs_than_may_wait_are_refused() -> None:
    async with serving(FakeEngine(pooling=EMBEDS), ServerConfig(max_num_queued_reqs=4)) as running:
        answer = await running.http.post("/v1/embeddings", json={"input": ["a"] * 5})
        assert answer.status_code == 400
        assert "the limit is 4" in answer.json()["error"]["message"]
        running.engine.gate.clear()
        held = asyncio.create_task(running.http.post("/v1/embeddings", json={"input": ["a"] * 4}))
        while running.app.context.admission.open < 4:  # noqa: ASYNC110  (another task fills it)
            await asyncio.sleep(0)
        refused = await running.http.post("/v1/embeddings", json={"input": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        running.engine.gate.set()
        assert (await held).status_code == 200
        assert running.app.context.admission.open == 0


async def test_a_vector_that_is_no_number_is_an_error_that_says_so(embedding: Served) -> None:
    embedding.engine.failure = NonFiniteLogitsError("the model produced NaN or infinite values at token 3")
    answer = await embedding.http.post("/v1/embeddings", json={"input": "abc"})
    assert answer.status_code == 500
    assert "NaN" in answer.json()["error"]["message"]


async def test_a_client_that_goes_away_aborts_its_inputs(embedding: Served) -> None:
    embedding.engine.gate.clear()
    asking = asyncio.create_task(embedding.http.post("/v1/embeddings", json={"input": ["a", "b"]}))
    while not embedding.engine.running:  # noqa: ASYNC110  (the request travels over a socket)
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    while embedding.engine.running:  # noqa: ASYNC110  (so does the end of the connection)
        await asyncio.sleep(0.001)
    assert embedding.engine.aborted
    assert embedding.app.context.admission.open == 0


async def test_a_model_that_generates_says_how_to_get_vectors(served: Served) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
    ):
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 400
        assert "--runner=pooling" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_embeds_says_where_to_ask(embedding: Served, stream: bool) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ):
        answer = await embedding.http.post(path, json={**body, "stream": stream})
        assert answer.status_code == 400
        assert "/v1/embeddings" in answer.json()["error"]["message"]


async def test_an_input_far_beyond_the_context_is_refused_before_it_is_tokenised(
    embedding: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a" * (512 * 9 + 1)
    cut = {"input": text, "truncate_prompt_tokens": -1}
    assert (await embedding.http.post("/v1/embeddings", json=cut)).json()["usage"]["prompt_tokens"] == 512
    monkeypatch.setattr(embedding.engine.tokenizer, "encode_batch", None)
    refused = await embedding.http.post("/v1/embeddings", json={"input": ["b", text]})
    assert refused.status_code == 400
    assert "513 tokens or more" in refused.json()["error"]["message"]

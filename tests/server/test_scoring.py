"""/rerank and /score over a real socket: cosine similarity of embeddings, and a cross-encoder's scores."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pagemill.model_config import PoolingConfig
from pagemill.server.pooling_schema import ClassifyResponse, PoolResponse, RerankResponse, ScoreResponse
from tests.server.conftest import Served, serving
from tests.server.fake_engine import BOS, EOS, FakeEngine


@pytest.fixture
async def embedding() -> AsyncIterator[Served]:
    async with serving(FakeEngine(pooling=PoolingConfig(kind="mean"))) as running:
        yield running


@pytest.fixture
async def crossing() -> AsyncIterator[Served]:
    """Scores are a tenth of the number of letters in both texts, through a sigmoid."""
    pooling = PoolingConfig(kind="cls", num_scores=1, score_activation="sigmoid")
    async with serving(FakeEngine(pooling=pooling)) as running:
        yield running


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_the_best_document_comes_first(embedding: Served, path: str) -> None:
    body = {"query": "abab", "documents": ["cdcd", {"text": "ab"}, "abcd"]}
    answer = await embedding.http.post(path, json=body)
    shown = RerankResponse.model_validate_json(answer.content, strict=True)
    assert [result.index for result in shown.results] == [1, 2, 0]
    assert [result.relevance_score for result in shown.results] == pytest.approx([1.0, math.sqrt(0.5), 0.0], abs=1e-6)
    assert shown.results[0].document == {"text": "ab"}
    assert shown.usage.prompt_tokens == 5 + 5 + 3 + 5
    assert len(embedding.engine.pooled) == 4, "the query is computed once"


async def test_only_the_best_few_without_their_texts(embedding: Served) -> None:
    body = {"query": "ab", "documents": ["cd", "ab", "abc"], "top_n": 2, "return_documents": False}
    answer = (await embedding.http.post("/rerank", json=body)).json()
    assert [result["index"] for result in answer["results"]] == [1, 2]
    assert all("document" not in result for result in answer["results"])


async def test_equal_scores_keep_the_documents_order(embedding: Served) -> None:
    answer = await embedding.http.post("/rerank", json={"query": "ab", "documents": ["ba", "ab", "abab"]})
    assert [result["index"] for result in answer.json()["results"]] == [0, 1, 2]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_one_text_with_many_and_many_with_as_many(embedding: Served, path: str) -> None:
    one = await embedding.http.post(path, json={"text_1": "ab", "text_2": ["ab", "cd"]})
    shown = ScoreResponse.model_validate_json(one.content, strict=True)
    assert [item.score for item in shown.data] == pytest.approx([1.0, 0.0], abs=1e-6)
    many = await embedding.http.post(path, json={"text_1": ["ab", "cd"], "text_2": ["ba", "ab"]})
    assert [item["score"] for item in many.json()["data"]] == pytest.approx([1.0, 0.0], abs=1e-6)


async def test_a_cross_encoder_reads_both_texts_of_a_pair(crossing: Served) -> None:
    answer = await crossing.http.post("/score", json={"text_1": "ab", "text_2": ["cde", "f"]})
    assert [item["score"] for item in answer.json()["data"]] == pytest.approx([sigmoid(0.5), sigmoid(0.3)])
    pair = crossing.engine.pooled[0]
    assert pair.token_ids == [BOS, 97, 98, EOS, 99, 100, 101, EOS]
    assert pair.second_segment == 4
    raw = await crossing.http.post("/score", json={"text_1": "ab", "text_2": "cde", "use_activation": False})
    assert raw.json()["data"][0]["score"] == pytest.approx(0.5)
    ranked = await crossing.http.post("/rerank", json={"query": "ab", "documents": ["c", "cdef", "cd"]})
    assert [result["index"] for result in ranked.json()["results"]] == [1, 2, 0]


async def test_a_long_document_is_cut_and_a_long_query_is_not(crossing: Served) -> None:
    body = {"text_1": "ab", "text_2": "cdefgh", "truncate_prompt_tokens": 7}
    await crossing.http.post("/score", json=body)
    assert crossing.engine.pooled[-1].token_ids == [BOS, 97, 98, EOS, 99, 100, EOS]
    refused = await crossing.http.post("/score", json={**body, "text_1": "abcdefgh"})
    assert refused.status_code == 400
    assert "shorten the query" in refused.json()["error"]["message"]


async def test_a_cross_encoder_does_not_embed(crossing: Served) -> None:
    answer = await crossing.http.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 400
    assert "use /classify, /score or /rerank" in answer.json()["error"]["message"]


async def test_a_classifier_of_several_classes_does_not_score() -> None:
    async with serving(FakeEngine(pooling=PoolingConfig(kind="cls", num_scores=3))) as running:
        answer = await running.http.post("/score", json={"text_1": "a", "text_2": "b"})
    assert answer.status_code == 400
    assert "has 3 outputs" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2048}, "documents"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(embedding: Served, path: str, body: dict[str, Any], param: str) -> None:
    answer = await embedding.http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "should have" not in answer.json()["error"]["message"], "Pydantic's sentence in the middle of ours"


@pytest.fixture
async def classifying() -> AsyncIterator[Served]:
    """Three equal logits, a tenth of the number of letters each."""
    pooling = PoolingConfig(kind="cls", num_scores=3, score_activation="softmax", labels=("bad", "fair", "good"))
    async with serving(FakeEngine(pooling=pooling)) as running:
        yield running


async def test_classes_have_probabilities_and_the_best_one_a_name(classifying: Served) -> None:
    answer = await classifying.http.post("/classify", json={"input": ["abc", "ab"]})
    shown = ClassifyResponse.model_validate_json(answer.content, strict=True)
    assert [(item.label, item.num_classes) for item in shown.data] == [("bad", 3)] * 2
    assert shown.data[0].probs == pytest.approx([1 / 3] * 3)
    raw = (await classifying.http.post("/classify", json={"input": "abc", "use_activation": False})).json()
    assert raw["data"][0]["probs"] == pytest.approx([0.3] * 3)
    assert shown.usage.prompt_tokens == 4 + 3


async def test_pooling_gives_what_the_model_makes(classifying: Served, embedding: Served) -> None:
    answer = await classifying.http.post("/pooling", json={"input": "abc", "task": "classify"})
    shown = PoolResponse.model_validate_json(answer.content, strict=True)
    assert shown.data[0].data == pytest.approx([1 / 3] * 3)
    body = {"input": ["ab", "c"], "encoding_format": "base64"}
    pooled = (await embedding.http.post("/pooling", json=body)).json()
    embedded = (await embedding.http.post("/v1/embeddings", json=body)).json()
    assert [item["data"] for item in pooled["data"]] == [item["embedding"] for item in embedded["data"]]
    body = {"input": "aab", "use_activation": False}
    (plain,) = (await embedding.http.post("/pooling", json=body)).json()["data"]
    assert max(plain["data"]) == 2


async def test_a_model_does_only_what_it_was_made_for(classifying: Served, embedding: Served, served: Served) -> None:
    refusals = [
        (embedding, "/classify", {"input": "a"}, "does not classify"),
        (embedding, "/pooling", {"input": "a", "task": "classify"}, "does not classify"),
        (classifying, "/pooling", {"input": "a", "task": "embed"}, "makes no embeddings"),
        (classifying, "/pooling", {"input": "a", "dimensions": 2}, "makes no embeddings"),
        (served, "/pooling", {"input": "a"}, "generates text"),
        (served, "/classify", {"input": "a"}, "generates text"),
        (embedding, "/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "float32"),
    ]
    for running, path, body, words in refusals:
        answer = await running.http.post(path, json=body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]

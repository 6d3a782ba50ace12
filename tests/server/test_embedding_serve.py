"""The whole: ``pagemill serve`` with models that pool, engines in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest

from tests.models.tiny_bert import sentence_transformer, tiny_bert
from tests.server.process import ServeProcess, serve_process

FLAGS = ("--num-threads", "1", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    path = sentence_transformer(tiny_bert(tmp_path_factory.mktemp("tiny") / "bert"), mode="mean_tokens")
    with serve_process(str(path), "--served-model-name", "tiny", *FLAGS) as running:
        yield running


def gauge(running: ServeProcess, name: str) -> float:
    lines = httpx.get(running.url + "/metrics").text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def test_it_says_how_to_ask_for_vectors(shared: ServeProcess) -> None:
    assert "/v1/embeddings" in shared.said


def test_openai_s_client_gets_the_same_bytes_alone_and_with_others(shared: ServeProcess) -> None:
    texts = ["the quick brown fox", "it", "jumping over the lazy dog"]
    with openai.OpenAI(base_url=shared.url + "/v1", api_key="none", max_retries=0) as asking:
        answer = asking.embeddings.create(model="tiny", input=texts)
        alone = [asking.embeddings.create(model="tiny", input=text).data[0].embedding for text in texts]
    assert answer.model == "tiny"
    got = [item.embedding for item in answer.data]
    assert got == alone
    assert all(np.linalg.norm(vector) == pytest.approx(1.0) for vector in got)


async def test_many_clients_are_served_side_by_side_and_nothing_stays(shared: ServeProcess) -> None:
    before = gauge(shared, "vllm:prompt_tokens_total")
    async with openai.AsyncOpenAI(base_url=shared.url + "/v1", api_key="none", max_retries=0, timeout=120) as asking:
        answers = await asyncio.gather(
            *(asking.embeddings.create(model="", input=["the fox"] * (1 + i % 5)) for i in range(24))
        )
    assert len({tuple(item.embedding) for answer in answers for item in answer.data}) == 1
    used = sum(answer.usage.prompt_tokens for answer in answers)
    assert gauge(shared, "vllm:prompt_tokens_total") - before == used
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert gauge(shared, name) == 0


async def test_clients_that_vanish_leave_nothing(shared: ServeProcess) -> None:
    body = {"input": ["the fox " * 40] * 500}
    async with httpx.AsyncClient(base_url=shared.url, timeout=60) as http:

        async def running() -> bool:
            text = (await http.get("/metrics")).text
            figures = [line for line in text.splitlines() if line.startswith("vllm:num_requests_")]
            return any(not line.endswith(" 0.0") for line in figures)

        asking = [asyncio.create_task(http.post("/v1/embeddings", json=body)) for _ in range(3)]
        while not await running():
            pass
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        while await running():
            pass
        assert not any(task.done() and not task.cancelled() for task in asking), "they were aborted, not finished"
        assert (await http.post("/v1/embeddings", json={"input": "it"})).status_code == 200
    assert gauge(shared, "vllm:kv_cache_usage_perc") == 0

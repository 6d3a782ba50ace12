"""/tokenize and /detokenize agree with each other and with what a request is charged for."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.server import tokenization
from pagemill.server.answer_schemas import TokenizerInfoResponse
from tests.server.conftest import Served
from tests.server.fake_engine import BOS

HI: list[Any] = [{"role": "user", "content": "hi"}]


async def test_text_with_and_without_special_tokens(served: Served) -> None:
    full = (await served.http.post("/tokenize", json={"prompt": "hé"})).json()
    bare = (await served.http.post("/tokenize", json={"prompt": "hé", "add_special_tokens": False})).json()
    assert full["tokens"] == [BOS, *"hé".encode()]
    assert full["count"] == 4
    assert full["max_model_len"] == 512
    assert bare["tokens"] == list("hé".encode())


async def test_the_special_tokens_are_told(served: Served) -> None:
    answer = await served.http.get("/tokenizer_info")
    info = TokenizerInfoResponse.model_validate_json(answer.content, strict=True)
    assert (info.bos_token, info.eos_token, info.pad_token, info.model_max_length) == ("<s>", "</s>", None, 512)


async def test_detokenize_inverts(served: Served) -> None:
    tokens = (await served.http.post("/tokenize", json={"prompt": "Grüße 😀"})).json()["tokens"]
    answer = (await served.http.post("/detokenize", json={"tokens": tokens})).json()
    assert answer["prompt"] == "<s>Grüße 😀"


async def test_counts_are_what_requests_use(served: Served) -> None:
    counted = (await served.http.post("/tokenize", json={"prompt": "some text"})).json()["count"]
    used = (await served.http.post("/v1/completions", json={"prompt": "some text"})).json()["usage"]
    assert counted == used["prompt_tokens"]
    counted = (await served.http.post("/tokenize", json={"messages": HI})).json()["count"]
    used = (await served.http.post("/v1/chat/completions", json={"messages": HI})).json()["usage"]
    assert counted == used["prompt_tokens"]


async def test_token_strings_on_request(served: Served) -> None:
    answer = (await served.http.post("/tokenize", json={"prompt": "a", "return_token_strs": True})).json()
    assert answer["token_strs"] == ["<s>", "a"]


async def test_long_text_is_tokenised_all_the_same(served: Served) -> None:
    answer = (await served.http.post("/tokenize", json={"prompt": "a" * 20_000})).json()
    assert answer["count"] == 20_001


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": HI}, {"prompt": 5}, {"messages": []}])
async def test_wrong_input(served: Served, body: dict[str, Any]) -> None:
    assert (await served.http.post("/tokenize", json=body)).status_code == 400


@pytest.mark.parametrize("tokens", [[260], [-1], ["a"], None, [2**40]])
async def test_wrong_tokens(served: Served, tokens: Any) -> None:
    answer = await served.http.post("/detokenize", json={"tokens": tokens})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("tokens")


async def test_a_text_that_would_make_millions_of_tokens_is_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "MAX_CHARS", 100)
    assert (await served.http.post("/tokenize", json={"prompt": "a" * 100})).json()["count"] == 101
    refused = await served.http.post("/tokenize", json={"prompt": "a" * 101})
    assert refused.status_code == 413
    assert "101 characters; the most is 100" in refused.json()["error"]["message"]

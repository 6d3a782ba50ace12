"""What becomes of a raw vector, texts cut or refused, and LLM.embed and LLM.score on real encoders."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagemill import LLM, PoolingParams
from pagemill.engine.pooling import Comparison, embedding
from pagemill.errors import NonFiniteLogitsError, PromptTooLongError, RequestError
from pagemill.model_config import PoolingConfig
from pagemill.models.sources import ModelSource
from pagemill.params import FinishReason, RequestOutput
from tests.models.tiny import tiny_llama
from tests.models.tiny_bert import sentence_transformer, tiny_bert, tiny_cross_encoder

EMBEDS = PoolingConfig(kind="mean")
TEXTS = ["A cat sits on the mat.", "The kitten is resting on a rug.", "Interest rates rose again in March.", "x" * 300]
OPTIONS: dict[str, Any] = {"num_threads": 1, "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 8}


def raw(*values: float) -> RequestOutput:
    return RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[1], outputs=[], pooled=np.float32(values).tobytes()
    )


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = sentence_transformer(tiny_bert(tmp_path_factory.mktemp("tiny") / "bert"), mode="mean_tokens")
    with LLM(path, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def crossing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(tiny_cross_encoder(tmp_path_factory.mktemp("tiny") / "cross"), **OPTIONS) as llm:
        yield llm


def test_a_vector_is_cut_first_and_scaled_then() -> None:
    assert embedding(raw(3, 4, 12), EMBEDS, PoolingParams(dimensions=2)).tolist() == pytest.approx([0.6, 0.8])
    assert embedding(raw(3, 4, 12), EMBEDS, PoolingParams(normalize=False)).tolist() == [3, 4, 12]


def test_huge_and_zero_vectors_stay_numbers() -> None:
    assert embedding(raw(3e38, 0), EMBEDS, PoolingParams()).tolist() == [1, 0]
    assert embedding(raw(0, 0), EMBEDS, PoolingParams()).tolist() == [0, 0]
    compared = Comparison(EMBEDS, ["a"], ["b"], ("x", "y"))
    assert compared.scores([raw(0, 0), raw(1, 0)]) == [0.0]


@pytest.mark.parametrize("logit", [-800.0, -1.0, 0.0, 1.0, 800.0])
def test_a_sigmoid_never_overflows(logit: float) -> None:
    compared = Comparison(PoolingConfig(kind="cls", num_scores=1, score_activation="sigmoid"), ["a"], ["b"], ("x", "y"))
    expected = 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0
    assert compared.scores([raw(logit)]) == pytest.approx([expected])
    assert compared.scores([raw(logit)], activate=False) == [logit]


@pytest.mark.filterwarnings("default")
def test_the_real_minilm_embeds_as_transformers_does(minilm_source: ModelSource) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_source.path)
    model = transformers.AutoModel.from_pretrained(minilm_source.path).eval()
    with LLM("all-minilm-l6-v2", **OPTIONS) as llm:
        assert llm.max_model_len == 256
        got = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
        near, far = (output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:3], use_tqdm=False))
    for text, vector in zip(TEXTS, got, strict=True):
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        expected = torch.nn.functional.normalize(states.mean(0), dim=0)
        torch.testing.assert_close(torch.tensor(vector), expected, atol=2e-6, rtol=0)
    assert near > 0.5 > 0.1 > far, "sentences that mean the same are near each other"


def test_every_form_of_prompt_and_one_pass_for_all(bert: LLM) -> None:
    ids = bert.tokenizer.encode("the fox")
    outputs = bert.embed(["the fox", {"prompt_token_ids": ids}, ids, {"prompt": "the fox"}], use_tqdm=False)
    vectors = [output.outputs.embedding for output in outputs]
    assert vectors[0] == vectors[1] == vectors[2] == vectors[3]
    assert np.linalg.norm(vectors[0]) == pytest.approx(1.0)
    assert bert.embed("the fox", use_tqdm=False)[0].prompt_token_ids == ids
    one = bert.embed("the fox", use_tqdm=False, pooling_params=PoolingParams(dimensions=3))
    assert len(one[0].outputs.embedding) == 3


def test_figures_count_inputs_and_their_tokens(bert: LLM) -> None:
    before = bert.stats()
    finished = bert.metrics.finished(FinishReason.STOP)
    outputs = bert.embed(["the fox", "it is lazy"], use_tqdm=False)
    after = bert.stats()
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    assert after.num_prompt_tokens - before.num_prompt_tokens == tokens
    assert after.num_generated_tokens == before.num_generated_tokens
    assert after.num_steps - before.num_steps == 1
    assert bert.metrics.finished(FinishReason.STOP) - finished == 2


def test_pairs_are_scored_by_cosine_or_by_the_classifier(bert: LLM, crossing: LLM) -> None:
    first, second = ["the fox", "it"], ["the dog", "it"]
    vectors = {text: np.array(bert.embed(text, use_tqdm=False)[0].outputs.embedding) for text in {*first, *second}}
    scores = [output.outputs.score for output in bert.score(first, second, use_tqdm=False)]
    assert scores == pytest.approx([float(vectors[a] @ vectors[b]) for a, b in zip(first, second, strict=True)])
    outputs = crossing.score("the fox", second, use_tqdm=False)
    logits = crossing.score("the fox", second, use_tqdm=False, use_activation=False)
    assert outputs[0].prompt_token_ids == crossing.tokenizer.encode_pairs([("the fox", "the dog")])[0][0]
    for output, logit in zip(outputs, logits, strict=True):
        assert output.outputs.score == pytest.approx(1 / (1 + math.exp(-logit.outputs.score)))


def test_a_cross_encoder_without_segments_scores_pairs(tmp_path: Path) -> None:
    with LLM(tiny_cross_encoder(tmp_path / "one", type_vocab_size=1), **OPTIONS) as llm:
        assert 0 < llm.score("the fox", "the dog", use_tqdm=False)[0].outputs.score < 1


def test_what_a_model_does_not_do_is_said(bert: LLM, crossing: LLM, tmp_path: Path) -> None:
    for llm in (bert, crossing):
        with pytest.raises(RequestError, match="makes vectors and no text"):
            llm.generate("a", use_tqdm=False)
    with pytest.raises(RequestError, match="use /classify, /score or /rerank"):
        crossing.embed("a")
    with LLM(tiny_llama(tmp_path / "llama"), **OPTIONS) as llm:
        for ask in (lambda: llm.embed("a"), lambda: llm.score("a", "b")):
            with pytest.raises(RequestError, match="--runner=pooling"):
                ask()


def test_inputs_that_cannot_be_computed_are_named_before_anything_runs(bert: LLM) -> None:
    steps = bert.stats().num_steps
    with pytest.raises(PromptTooLongError, match=r"input 1: the input has 302 tokens and this model takes 96"):
        bert.embed(["a", "a " * 300], use_tqdm=False)
    with pytest.raises(RequestError, match="input 1 is empty"):
        bert.embed(["a", ""], use_tqdm=False)
    with pytest.raises(RequestError, match="token id 100000; this model's ids are 0 to"):
        bert.embed([100_000], use_tqdm=False)
    with pytest.raises(RequestError, match="data_1 has 2 texts and data_2 has 3"):
        bert.score(["a"] * 2, ["b"] * 3)
    assert bert.stats().num_steps == steps
    long = bert.embed("a " * 300, use_tqdm=False, truncate_prompt_tokens=-1)[0].prompt_token_ids
    assert len(long) == 96
    assert (long[0], long[-1]) == (2, 3)


def test_a_vector_with_nan_raises_and_the_engine_lives(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tiny_bert(tmp_path / "bert", num_hidden_layers=1)
    weights = load_file(path / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][9] = 3e38
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with LLM(path, **OPTIONS) as llm:
        with pytest.raises(NonFiniteLogitsError, match="NaN"):
            llm.embed([[6, 9, 7]], use_tqdm=False)
        assert llm.embed([[6, 7]], use_tqdm=False)


def test_a_decoder_in_rotated_int8_gives_nearly_the_same_hidden_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "cache"))
    path = tiny_llama(tmp_path / "llama")
    vectors = []
    for options in ({"dtype": "float32"}, {"quantization": "int8"}):
        with LLM(path, runner="pooling", **OPTIONS, **options) as llm:
            vectors.append(np.array(llm.embed("the quick brown fox", use_tqdm=False)[0].outputs.embedding))
    assert vectors[0] @ vectors[1] > 0.99

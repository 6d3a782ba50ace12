"""BERT's family against transformers: hidden states, classifier, tokenizer, and what a folder says about pooling."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.config import EngineConfig
from pagemill.errors import ConfigError, ModelFormatError, UnsupportedModelError
from pagemill.model_config import PoolingConfig
from pagemill.models.checkpoint import open_checkpoint
from pagemill.models.encoder import Model
from pagemill.models.loader import load_model
from pagemill.models.sources import resolve_source
from pagemill.models.tokenizer import load_tokenizer
from tests.models.paged import PagedRun
from tests.models.tiny import tiny_llama
from tests.models.tiny_bert import VOCABULARY, sentence_transformer, tiny_bert, tiny_cross_encoder

TOLERANCE = 2e-5
"""Largest difference of a hidden state; they are a few units wide."""
TEXTS = ("The quick brown fox jumps over the lazy dog.", "it", "What is jumping? é!", "x" * 120)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("tiny") / "bert")


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_cross_encoder(tmp_path_factory.mktemp("tiny") / "cross")


def load(path: Path, **options: Any) -> Model:
    checkpoint = open_checkpoint(resolve_source(str(path)))
    try:
        return load_model(checkpoint, EngineConfig(model=str(path), **options), native=False)
    finally:
        checkpoint.close()


def pooling(path: Path, **options: Any) -> PoolingConfig | None:
    return load(path, **options).config.pooling


def ids(length: int, seed: int) -> list[int]:
    return torch.randint(5, len(VOCABULARY), (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def hidden(model: Model, rows: Sequence[list[int]]) -> list[torch.Tensor]:
    """Hidden states of several inputs, computed in one step."""
    run = PagedRun(model, rows=len(rows), max_len=96)  # type: ignore[arg-type]
    return list(run.step(dict(enumerate(rows))).split([len(row) for row in rows]))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("heads", [4, 3])
def test_hidden_states_equal_transformers_whatever_else_is_in_the_step(tmp_path: Path, heads: int) -> None:
    import transformers

    path = tiny_bert(tmp_path / "bert", num_attention_heads=heads)
    reference = transformers.BertModel.from_pretrained(path).eval()
    rows = [ids(length, length) for length in (1, 16, 17, 96)]
    for row, got in zip(rows, hidden(load(path), rows), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([row])).last_hidden_state[0]
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.filterwarnings("default")
def test_a_classifier_s_scores_equal_transformers(cross_encoder: Path) -> None:
    import transformers

    reference = transformers.BertForSequenceClassification.from_pretrained(cross_encoder).eval()
    row = ids(20, 1)
    with torch.inference_mode():
        expected = reference(torch.tensor([row])).logits[0]
    model = load(cross_encoder)
    assert model.config.pooling == PoolingConfig(
        kind="cls", num_scores=1, score_activation="sigmoid", labels=("LABEL_0",)
    )
    torch.testing.assert_close(hidden(model, [row])[0][0], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("problem", "activation"), [("single_label_classification", "softmax"), ("multi_label_classification", "sigmoid")]
)
def test_a_classifier_of_many_classes_has_their_names_and_its_problem_s_activation(
    tmp_path: Path, problem: str, activation: str
) -> None:
    labels = {0: "bad", 1: "fair", 2: "good"}
    kind = "BertForSequenceClassification"
    path = tiny_bert(tmp_path / "bert", kind=kind, id2label=labels, problem_type=problem)
    assert load(path).config.pooling == PoolingConfig(
        kind="cls", num_scores=3, score_activation=activation, labels=("bad", "fair", "good")
    )


@pytest.mark.filterwarnings("default")
def test_a_vocabulary_file_tokenises_as_transformers_does(bert: Path) -> None:
    import transformers

    ours, theirs = load_tokenizer(resolve_source(str(bert))), transformers.BertTokenizer.from_pretrained(bert)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
    pair = theirs("what is it?", "the fox")
    second = pair["token_type_ids"].index(1)
    assert ours.encode_pairs([("what is it?", "the fox")]) == [(pair["input_ids"], second, second)]
    assert ours.decode(ours.encode("jumping over it")) == "jumping over it"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["Roberta", "XLMRoberta"])
def test_roberta_counts_positions_from_behind_the_padding(tmp_path: Path, kind: str) -> None:
    import transformers

    for suffix, output in (("Model", "last_hidden_state"), ("ForSequenceClassification", "logits")):
        path = tiny_bert(tmp_path / suffix, kind=kind + suffix, num_labels=1, pad_token_id=1, type_vocab_size=1)
        reference = getattr(transformers, kind + suffix).from_pretrained(path).eval()
        rows = [ids(length, length) for length in (1, 20, 94)]
        model = load(path)
        assert model.config.max_position_embeddings == 94
        for row, got in zip(rows, hidden(model, rows), strict=True):
            with torch.inference_mode():
                expected = getattr(reference(torch.tensor([row])), output)[0]
            torch.testing.assert_close(
                got[: len(got) if suffix == "Model" else 1].reshape(expected.shape), expected, atol=TOLERANCE, rtol=0
            )


def test_two_texts_of_a_tokenizer_without_segments_are_told_apart() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, processors

    from pagemill.models.tokenizer import Tokenizer

    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 2, "a": 3, "b": 4}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer = Tokenizer(backend, special_tokens={}, eos_ids=())
    assert tokenizer.encode_pairs([("a a", "b")]) == [([0, 3, 3, 2, 2, 4, 2], 5, None)]


def test_a_file_that_is_no_vocabulary_is_named(bert: Path, tmp_path: Path) -> None:
    path = tiny_bert(tmp_path / "bert", num_hidden_layers=1)
    (path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(ModelFormatError, match=r"vocab.txt has no '\[UNK\]'"):
        load_tokenizer(resolve_source(str(path)))


@pytest.mark.parametrize(
    ("mode", "normalize", "kind"),
    [("cls_token", True, "cls"), ("mean_tokens", False, "mean"), ("lasttoken", True, "last")],
)
def test_a_sentence_transformers_folder_says_how_to_pool(tmp_path: Path, mode: str, normalize: bool, kind: str) -> None:
    path = sentence_transformer(
        tiny_bert(tmp_path / "bert", num_hidden_layers=1), mode=mode, normalize=normalize, max_seq_length=40
    )
    assert pooling(path) == PoolingConfig(kind=kind, normalize=normalize)
    assert load(path).config.usual_context == 40


def test_the_user_s_word_goes_before_the_folder_s(tmp_path: Path) -> None:
    path = sentence_transformer(tiny_bert(tmp_path / "bert", num_hidden_layers=1), mode="mean_tokens")
    chosen = pooling(path, pooler_config='{"pooling_type": "CLS", "normalize": false}')
    assert chosen == PoolingConfig(kind="cls", normalize=False)


def test_a_decoder_pools_where_it_is_told_to_or_where_its_folder_says_so(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "llama")
    assert pooling(path) is None
    assert pooling(path, runner="pooling") == PoolingConfig(kind="last")
    sentence_transformer(path, mode="mean_tokens")
    assert pooling(path) == PoolingConfig(kind="mean")
    assert pooling(path, runner="generate") is None


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_saved_without_its_head_pools(tmp_path: Path, tied: bool) -> None:
    import transformers

    whole = tiny_llama(tmp_path / "whole", tie_word_embeddings=tied)
    reference = transformers.LlamaModel.from_pretrained(whole).eval()
    reference.save_pretrained(tmp_path / "headless")
    for path in (whole, tmp_path / "headless"):
        options = {} if path != whole else {"runner": "pooling"}
        model = load(path, **options)
        assert model.config.pooling == PoolingConfig(kind="last")
        row = ids(30, 4)
        with torch.inference_mode():
            expected = reference(torch.tensor([row])).last_hidden_state[0]
        torch.testing.assert_close(hidden(model, [row])[0], expected, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runner": "generate"}, "is an encoder and makes no text"),
        ({"pooler_config": "mean"}, "must be a JSON object"),
        ({"pooler_config": '{"pooling_type": "MAX"}'}, "'MAX' is unknown; choose one of CLS, LAST, MEAN"),
        ({"pooler_config": '{"pool": 1}'}, "has 'pool'; known are pooling_type and normalize"),
        ({"pooler_config": '{"normalize": 1}'}, "normalize must be true or false"),
        ({"quantization": "int8"}, "is for decoders"),
        ({"max_model_len": 97}, "longer than the model's 96 positions"),
    ],
)
def test_what_cannot_work_is_refused_by_name(bert: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(bert, **options)


def test_a_pooler_for_a_model_that_generates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add --runner=pooling"):
        load(tiny_llama(tmp_path / "llama"), pooler_config='{"pooling_type": "MEAN"}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
        ({"position_embedding_type": "relative_key"}, "only absolute is"),
        ({"sbert_ce_default_activation_function": "torch.nn.Tanh"}, "score activation 'torch.nn.Tanh'"),
    ],
)
def test_features_that_would_change_results_are_refused(
    cross_encoder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "changed"
    path.mkdir()
    for file in cross_encoder.iterdir():
        (path / file.name).symlink_to(file)
    config = json.loads((cross_encoder / "config.json").read_text())
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModelError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("{", "is no list of modules"),
        ('[{"type": "x.Dense", "path": ""}]', "module 'Dense'; supported are"),
        ('[{"type": "x.Transformer", "path": ""}]', "has 0 pooling stages"),
        ('[{"type": "x.Pooling", "path": "../elsewhere"}]', "not inside the folder"),
        ('[{"type": "x.Pooling", "path": "2_Pooling"}]', "config.json is missing"),
    ],
)
def test_a_folder_of_other_modules_is_refused_by_name(tmp_path: Path, modules: str, message: str) -> None:
    path = tiny_bert(tmp_path / "bert", num_hidden_layers=1)
    (path / "modules.json").write_text(modules)
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=message):
        load(path)

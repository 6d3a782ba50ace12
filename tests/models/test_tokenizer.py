"""The tokenizer of a folder or file: ids, bytes, special tokens, and which ids end a text."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pagemill.errors import ModelFormatError, ModelNotFoundError, RequestError
from pagemill.models.checkpoint import open_checkpoint
from pagemill.models.sources import ModelSource
from pagemill.models.tokenizer import Tokenizer, load_tokenizer
from tests.models.files import write_gguf
from tests.models.test_gguf_tokenizer import SMOLLM_METADATA, SPM, SPM_OURS, TEXT, spm_metadata

SPECIAL = ["<s>", "</s>", "<|im_end|>"]


def backend() -> Backend:
    """Byte-level, one token per byte, then the special ones, then a visible added one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Backend(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(piece, normalized=False) for piece in SPECIAL])
    made.add_tokens([AddedToken("<tool> é", normalized=False)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return made


def folder(path: Path, **files: Any) -> ModelSource:
    """A model folder; keyword ``a__b`` is the file a.b."""
    if "tokenizer__json" not in files and "tokenizer__model" not in files:
        backend().save(str(path / "tokenizer.json"))
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (path / name.replace("__", ".")).write_bytes(data)
    return ModelSource(name="m", path=path, format="safetensors")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(folder(tmp_path, tokenizer_config__json={"bos_token": "<s>", "eos_token": "</s>"}))


def test_special_tokens_are_added_only_when_asked(tokenizer: Tokenizer) -> None:
    with_bos, without = tokenizer.encode("hi"), tokenizer.encode("hi", add_special_tokens=False)
    assert with_bos == [256, *without]
    assert tokenizer.encode_batch(["hi", ""]) == [with_bos, [256]]
    assert tokenizer.encode_batch([]) == []


def test_a_chat_that_writes_its_own_bos_gets_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<s>hi", add_special_tokens=False).count(256) == 1


def test_ids_and_names(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (256, (257,), 260)
    assert tokenizer.special_ids == {256, 257, 258}
    assert tokenizer.token_to_id("<|im_end|>") == 258
    assert tokenizer.id_to_token(258) == "<|im_end|>"
    assert tokenizer.id_to_token(260) is None
    assert tokenizer.id_to_token(-1) is None
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_special_tokens_are_left_out_of_text_when_asked(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a</s>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s>b"


def test_token_bytes_of_added_tokens_are_their_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(259) == "<tool> é".encode()
    assert tokenizer.token_bytes(257) == b"</s>"
    assert tokenizer.token_bytes(10**9) == b""
    assert tokenizer.token_bytes(-1) == b""


BYTE_LEVEL = Tokenizer(backend(), special_tokens={}, eos_ids=[])
SENTENCEPIECE = Tokenizer(SPM_OURS.backend, special_tokens={}, eos_ids=[], before=[])


@settings(max_examples=200, deadline=None)
@given(TEXT.filter(lambda text: "▁" not in text and "\0" not in text and "<" not in text))
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(text: str) -> None:
    pieces = b"".join(BYTE_LEVEL.token_bytes(index) for index in BYTE_LEVEL.encode(text, add_special_tokens=False))
    assert pieces == text.encode()
    pieces = b"".join(SENTENCEPIECE.token_bytes(index) for index in SENTENCEPIECE.encode(text))
    assert pieces == (b" " + text.encode() if text else b"")


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_a_lone_surrogate_is_the_callers_fault(text: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode(text)
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode_batch(["fine", text])


def test_nothing_is_truncated_or_padded_whatever_the_file_asks(tmp_path: Path) -> None:
    asking = backend()
    asking.enable_truncation(4)
    asking.enable_padding(length=16)
    asking.save(str(tmp_path / "asking.json"))
    source = folder(tmp_path, tokenizer__json=json.loads((tmp_path / "asking.json").read_text()))
    assert len(load_tokenizer(source).encode("0123456789")) == 11
    assert len(load_tokenizer(source).encode("0")) == 2


ENDS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"generation_config__json": {"eos_token_id": [258, 257]}, "config__json": {"eos_token_id": 257}}, (258, 257)),
    ({"generation_config__json": {"eos_token_id": 258}, "tokenizer_config__json": {"eos_token": "</s>"}}, (258, 257)),
    ({"config__json": {"eos_token_id": 257}, "tokenizer_config__json": {"eos_token": "<|im_end|>"}}, (257, 258)),
    ({"config__json": {"text_config": {"eos_token_id": [258]}}}, (258,)),
    ({"tokenizer_config__json": {"eos_token": {"content": "<|im_end|>", "special": True}}}, (258,)),
    ({"special_tokens_map__json": {"eos_token": {"content": "</s>"}}}, (257,)),
    ({"config__json": {"eos_token_id": None}, "generation_config__json": {"eos_token_id": 10**6}}, ()),
]


@pytest.mark.parametrize(("files", "ends"), ENDS)
def test_a_text_ends_at_what_any_of_the_files_says(
    files: dict[str, Any], ends: tuple[int, ...], tmp_path: Path
) -> None:
    assert load_tokenizer(folder(tmp_path, **files)).eos_ids == ends


TEMPLATES: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"tokenizer_config__json": {"chat_template": "A"}}, "A"),
    ({"tokenizer_config__json": {"chat_template": "A"}, "chat_template__jinja": b"B"}, "B"),
    ({"tokenizer_config__json": {"chat_template": "A"}, "chat_template__json": {"chat_template": "C"}}, "C"),
    (
        {
            "tokenizer_config__json": {
                "chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
            }
        },
        "D",
    ),
]


@pytest.mark.parametrize(("files", "template"), TEMPLATES)
def test_the_chat_template_is_found_wherever_it_is(files: dict[str, Any], template: str | None, tmp_path: Path) -> None:
    assert load_tokenizer(folder(tmp_path, **files)).chat_template == template


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json, tokenizer\.model or vocab\.txt"):
        load_tokenizer(ModelSource(name="m", path=tmp_path, format="safetensors"))


@pytest.mark.parametrize("content", [b"{", b"{}", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_file_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json is not a tokenizer") as caught:
        load_tokenizer(folder(tmp_path, tokenizer__json=content))
    assert "\n" not in str(caught.value)


def test_a_post_processor_that_names_no_token_is_refused(tmp_path: Path) -> None:
    content = json.loads(backend().to_str())
    content["post_processor"]["special_tokens"] = {}
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(folder(tmp_path, tokenizer__json=content))


def test_a_sentencepiece_file_serves_where_there_is_nothing_else(tmp_path: Path) -> None:
    settings_file = {"add_bos_token": True, "chat_template": "T", "bos_token": "<s>", "eos_token": "</s>"}
    model = SPM.serialized_model_proto()
    source = folder(tmp_path, tokenizer__model=model, tokenizer_config__json=settings_file)
    tokenizer = load_tokenizer(source)
    assert tokenizer.encode("The fox") == [SPM.bos_id(), *SPM.encode("The fox")]
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"
    assert tokenizer.eos_ids == (SPM.eos_id(),)
    assert tokenizer.chat_template == "T"
    settings_file["add_bos_token"] = False
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_file))
    assert load_tokenizer(source).encode("The fox") == SPM.encode("The fox")


def test_a_gguf_file_and_its_checkpoint_give_the_same_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={**spm_metadata(SPM), "tokenizer.chat_template": "T"})
    source = ModelSource(name="m", path=path, format="gguf")
    tokenizer = load_tokenizer(source)
    assert tokenizer.encode("fox") == [SPM.bos_id(), *SPM.encode("fox")]
    assert tokenizer.chat_template == "T"
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    checkpoint = open_checkpoint(source)
    assert load_tokenizer(checkpoint).encode("fox") == tokenizer.encode("fox")


def test_another_tokenizer_can_stand_in(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    settings_file = {"chat_template": "the model's own"}
    source = folder(tmp_path / "a", generation_config__json={"eos_token_id": 258}, tokenizer_config__json=settings_file)
    path = write_gguf(tmp_path / "m.gguf", metadata=SMOLLM_METADATA)
    assert load_tokenizer(source, str(path)).bos_id == 1
    assert load_tokenizer(source, str(path)).chat_template == "the model's own"
    (tmp_path / "c").mkdir()
    bare = ModelSource(name="m", path=tmp_path / "c", format="safetensors")
    assert load_tokenizer(bare, str(path)).chat_template is None
    folder(tmp_path / "b", tokenizer_config__json={"eos_token": "</s>"})
    assert load_tokenizer(source, str(tmp_path / "b")).eos_ids == (258, 257)
    assert load_tokenizer(source, str(tmp_path / "b" / "tokenizer.json")).eos_ids == (258, 257)


def test_it_survives_the_way_to_another_process(tokenizer: Tokenizer) -> None:
    for original in (tokenizer, SENTENCEPIECE):
        copy = pickle.loads(pickle.dumps(original))
        assert copy.encode("hi 😀") == original.encode("hi 😀")
        assert copy.token_bytes(60) == original.token_bytes(60)
        assert (copy.eos_ids, copy.special_ids) == (original.eos_ids, original.special_ids)


def test_many_ids_are_decoded_as_few_are(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Grüße <s> 😀") * 1000
    assert len(ids) > 4096
    for skip in (True, False):
        few = tokenizer.decode(ids[: len(ids) // 1000], skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == few * 1000

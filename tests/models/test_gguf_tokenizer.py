"""Tokenizers from a vocabulary alone give the ids of the tokenizer that the vocabulary was taken from."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pagemill.errors import ModelFormatError, UnsupportedModelError
from pagemill.models.gguf_tokenizer import PieceType, from_metadata, from_sentencepiece
from pagemill.models.pretokenizers import kind_of
from pagemill.models.sources import ModelSource
from pagemill.models.tokenizer import load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 2026 and we've 1,234,567.89 things.\n",
    "def encode(text: str) -> list[int]:\n    return [ord(c) for c in text]  # naïve café résumé\n\n\t\tx += 1\n",
    "Größe, façade, señor, Жизнь прекрасна, 日本語のテキスト, 한국어 텍스트, مرحبا بالعالم, 😀🎉👩‍👩‍👧\n",
    "HTTPServer camelCase SCREAMING_CASE x=1;y=2 <html></html> $100 50% ~~~ ``` ||| ++ -- ==\r\n\r\n",
]
TRICKY = [
    "",
    " ",
    "    ",
    "a  b   c",
    "\n\n\n x",
    "1",
    "12",
    "1234567",
    "٣٤٥ ½ Ⅷ",
    "don't DON'T we'LL",
    "café vs café",  # composed and combining accent
    "em—dash – en-dash … “quotes”",
    "😀😀 👩‍👩‍👧 ",
    "a\tb\r\nc\u00a0d\u3000e",
    "日本語 mixed with English 123",
    "\u0000\u0001",
    "<|im_start|>user\nhi<|im_end|>",
    "x<|im_end|>y",
    "<|IM_END|> <|im_end",
    "Ġ Ċ ▁ <0x41>",
]
TEXT = st.one_of(st.text(max_size=60), st.text(alphabet="ab 12\n'é😀<|>im_end.,", max_size=60))


def digits_then_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def cut_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# As published in the models' tokenizer.json.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REFERENCES: dict[str, tuple[pre_tokenizers.PreTokenizer, bool]] = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False),
    "olmo": (pre_tokenizers.ByteLevel(add_prefix_space=False), True),
    "smollm": (digits_then_words(), False),
    "starcoder": (digits_then_words(), False),
    "command-r": (digits_then_words(), True),
    "qwen2": (cut_by(QWEN2), True),
    "stablelm2": (cut_by(QWEN2), False),
    "dbrx": (cut_by(LLAMA3), False),
    "llama-bpe": (cut_by(LLAMA3), False),
    "tekken": (cut_by(TEKKEN), False),
    "falcon": (
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"[\p{P}\$\+<=>\^~\|`]+"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
                pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
            ]
        ),
        False,
    ),
}


def reference(kind: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer trained as that kind, and the GGUF metadata that llama.cpp's converter would write for it."""
    pre_tokenizer, nfc = REFERENCES[kind]
    name = kind_of(kind)
    assert name is not None
    backend = Tokenizer(models.BPE(ignore_merges=name.ignore_merges))
    backend.pre_tokenizer = pre_tokenizer
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    model = json.loads(backend.to_str())["model"]
    size = backend.get_vocab_size()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": [backend.id_to_token(index) for index in range(size)],
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (size - 4), 4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return backend, metadata


@pytest.mark.parametrize("kind", REFERENCES)
def test_byte_level_bpe_gives_the_ids_of_its_original(kind: str) -> None:
    original, metadata = reference(kind)
    ours = from_metadata(metadata, "m.gguf").backend
    for text in [*TRICKY, *CORPUS, "<tool> x<tool>y"]:
        expected = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == expected, text
        assert ours.decode(expected) == original.decode(expected)


SMOLLM, SMOLLM_METADATA = reference("smollm")
OURS = from_metadata(SMOLLM_METADATA, "m.gguf").backend


@settings(max_examples=300, deadline=None)
@given(TEXT)
def test_byte_level_bpe_gives_the_ids_of_its_original_for_any_text(text: str) -> None:
    assert OURS.encode(text, add_special_tokens=False).ids == SMOLLM.encode(text, add_special_tokens=False).ids


def test_an_unknown_pre_tokenizer_warns_and_falls_back_to_the_default(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        unknown = from_metadata({**SMOLLM_METADATA, "tokenizer.ggml.pre": "of-tomorrow"}, "m.gguf").backend
    assert "m.gguf: pre-tokenizer 'of-tomorrow' is not known" in caplog.text
    default = from_metadata({**SMOLLM_METADATA, "tokenizer.ggml.pre": "default"}, "m.gguf").backend
    for text in CORPUS:
        assert unknown.encode(text).ids == default.encode(text).ids


def test_a_missing_pre_tokenizer_warns(caplog: pytest.LogCaptureFixture) -> None:
    without = {key: value for key, value in SMOLLM_METADATA.items() if key != "tokenizer.ggml.pre"}
    with caplog.at_level(logging.WARNING):
        from_metadata(without, "m.gguf")
    assert "pre-tokenizer None is not known" in caplog.text


def test_the_file_says_whether_bos_and_eos_are_added() -> None:
    vocabulary = from_metadata(SMOLLM_METADATA, "m.gguf")
    assert (vocabulary.add_bos, vocabulary.add_eos) == (False, False)
    stored = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    vocabulary = from_metadata(SMOLLM_METADATA | stored, "m.gguf")
    assert (vocabulary.add_bos, vocabulary.add_eos) == (True, True)
    llama3 = from_metadata(reference("llama-bpe")[1], "m.gguf")
    assert llama3.add_bos


def test_every_control_piece_that_ends_a_turn_ends_the_text() -> None:
    assert from_metadata(SMOLLM_METADATA, "m.gguf").end_ids == (2, 0)  # <|im_end|>, then <|endoftext|>
    stored = SMOLLM_METADATA | {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9}
    assert from_metadata(stored, "m.gguf").end_ids == (7, 9, 0, 2)


def test_a_special_id_outside_the_vocabulary_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        vocabulary = from_metadata(SMOLLM_METADATA | {"tokenizer.ggml.bos_token_id": 10**9}, "m.gguf")
    assert vocabulary.bos_id is None
    assert "bos_token_id=1000000000" in caplog.text


BROKEN: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tokenizer.ggml.model": None}, ModelFormatError, "model is missing"),
    ({"tokenizer.ggml.model": "bert"}, UnsupportedModelError, "kind 'bert'"),
    ({"tokenizer.ggml.tokens": []}, ModelFormatError, "tokens is not a list"),
    ({"tokenizer.ggml.tokens": [1, 2]}, ModelFormatError, "tokens is not a list"),
    ({"tokenizer.ggml.merges": None}, ModelFormatError, "merges is not a list"),
    ({"tokenizer.ggml.merges": ["zz qq"]}, ModelFormatError, "merges do not fit"),
    ({"tokenizer.ggml.merges": ["nospace"]}, ModelFormatError, "merges do not fit"),
    ({"tokenizer.ggml.token_type": [1]}, ModelFormatError, "token_type is not a list of"),
    ({"tokenizer.ggml.model": "llama"}, ModelFormatError, "without tokenizer.ggml.scores"),
]


@pytest.mark.parametrize(("change", "error", "reason"), BROKEN)
def test_metadata_that_makes_no_tokenizer_is_refused(
    change: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason) as caught:
        from_metadata(SMOLLM_METADATA | change, "m.gguf")
    assert "\n" not in str(caught.value)


def test_pieces_that_occur_twice_keep_their_first_id() -> None:
    tokens = SMOLLM_METADATA["tokenizer.ggml.tokens"]
    types = SMOLLM_METADATA["tokenizer.ggml.token_type"]
    more = {"tokenizer.ggml.tokens": [*tokens, "a", ""], "tokenizer.ggml.token_type": [*types, 1, 1]}
    vocabulary = from_metadata(SMOLLM_METADATA | more, "m.gguf")
    assert vocabulary.size == len(tokens) + 2
    assert vocabulary.backend.encode("a").ids == [tokens.index("a")]


def trained(**options: Any) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE model with byte fallback, as Llama 2's is."""
    proto = io.BytesIO()
    settings_ = {
        "vocab_size": 420,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "character_coverage": 0.98,
        "minloglevel": 2,
        **options,
    }
    lines = [line for text in CORPUS for line in text.splitlines() if line] * 3
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=proto, **settings_)
    return sentencepiece.SentencePieceProcessor(model_proto=proto.getvalue())


def spm_metadata(spm: sentencepiece.SentencePieceProcessor, **more: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes for a SentencePiece model."""

    def kind(index: int) -> int:
        checks = {
            PieceType.UNKNOWN: spm.is_unknown,
            PieceType.CONTROL: spm.is_control,
            PieceType.UNUSED: spm.is_unused,
            PieceType.BYTE: spm.is_byte,
        }
        return next((int(value) for value, check in checks.items() if check(index)), 1)

    size = spm.vocab_size()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [spm.id_to_piece(index) for index in range(size)],
        "tokenizer.ggml.scores": [spm.get_score(index) for index in range(size)],
        "tokenizer.ggml.token_type": [kind(index) for index in range(size)],
        "tokenizer.ggml.bos_token_id": spm.bos_id(),
        "tokenizer.ggml.eos_token_id": spm.eos_id(),
        "tokenizer.ggml.unknown_token_id": spm.unk_id(),
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


SPM = trained()
SPM_OURS = from_metadata(spm_metadata(SPM), "m.gguf")
PLAIN = [text for text in TRICKY if "▁" not in text and "\0" not in text]


@pytest.mark.parametrize("text", [*PLAIN, *CORPUS])
def test_sentencepiece_bpe_gives_the_ids_of_its_original(text: str) -> None:
    assert SPM_OURS.backend.encode(text).ids == SPM.encode(text)


@settings(max_examples=300, deadline=None)
@given(TEXT.filter(lambda text: "▁" not in text and "\0" not in text and "<" not in text))
def test_sentencepiece_bpe_gives_the_ids_of_its_original_for_any_text(text: str) -> None:
    ids = SPM.encode(text)
    assert SPM_OURS.backend.encode(text).ids == ids
    assert SPM_OURS.backend.decode(ids) == text


def test_sentencepiece_defaults_add_bos_and_a_leading_space() -> None:
    assert (SPM_OURS.add_bos, SPM_OURS.add_eos) == (True, False)
    bare = from_metadata(spm_metadata(SPM, add_space_prefix=False), "m.gguf").backend
    assert bare.encode(" fox").ids == SPM_OURS.backend.encode("fox").ids
    assert bare.encode("fox").ids != SPM_OURS.backend.encode("fox").ids
    assert bare.decode(bare.encode(" fox").ids) == " fox"


def test_special_pieces_match_whole_and_bytes_do_not() -> None:
    backend = SPM_OURS.backend
    assert backend.encode("</s>").ids == [SPM.eos_id()]
    assert len(backend.encode("<0x41>").ids) > 1  # text that looks like a byte piece stays text


def test_user_defined_pieces_match_whole_before_the_merges() -> None:
    spm = trained(user_defined_symbols=["<turn>", "▁▁", "▁▁▁"], add_dummy_prefix=False)
    metadata = spm_metadata(spm, add_space_prefix=False)
    for piece in ("<turn>", "▁▁", "▁▁▁"):
        metadata["tokenizer.ggml.token_type"][spm.piece_to_id(piece)] = PieceType.USER_DEFINED
    backend = from_metadata(metadata, "m.gguf").backend
    for text in ("<turn>the<turn>", "a  the   dog", "    x", "the fox", " the"):
        assert backend.encode(text).ids == spm.encode(text), text


def test_a_sentencepiece_file_gives_the_ids_of_its_original() -> None:
    for options in ({}, {"normalization_rule_name": "nmt_nfkc"}, {"add_dummy_prefix": False}):
        spm = trained(**options)
        vocabulary = from_sentencepiece(spm.serialized_model_proto(), "tokenizer.model")
        assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id) == (spm.bos_id(), spm.eos_id(), spm.unk_id())
        for text in CORPUS[:3]:
            assert vocabulary.backend.encode(text).ids == spm.encode(text)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 400))
def test_a_broken_sentencepiece_file_raises_only_our_errors(piece: bytes, at: int) -> None:
    data = bytearray(SPM.serialized_model_proto())
    data[at : at + len(piece)] = piece
    for broken in (piece, bytes(data), bytes(data[:at])):
        try:
            from_sentencepiece(broken, "tokenizer.model")
        except (ModelFormatError, UnsupportedModelError):
            continue


def test_a_unigram_sentencepiece_file_is_refused() -> None:
    spm = trained(model_type="unigram", vocab_size=380)
    with pytest.raises(UnsupportedModelError, match="type 1"):
        from_sentencepiece(spm.serialized_model_proto(), "tokenizer.model")


def test_the_embedded_models_tokenizer_is_smollm2s(embedded_source: ModelSource) -> None:
    tokenizer = load_tokenizer(embedded_source)
    assert tokenizer.encode("Hello, world! 1234") == [19556, 28, 905, 17, 216, 33, 34, 35, 36]
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2, 0), 49152)
    metadata_pre_tokenizer = digits_then_words()
    for text in [*TRICKY, *CORPUS]:
        words = [word for word, _ in metadata_pre_tokenizer.pre_tokenize_str(text)]
        assert [word for word, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)] == words
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


KEYS = sorted({*SMOLLM_METADATA, *spm_metadata(SPM), "tokenizer.chat_template", "tokenizer.ggml.add_bos_token"})
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.sampled_from(["gpt2", "llama", "qwen2", "default", ""]),
    st.lists(st.text(max_size=4), max_size=6),
    st.lists(st.integers(-9, 9), max_size=6),
    st.lists(st.floats(), max_size=6),
)


@settings(max_examples=150, deadline=None)
@given(st.booleans(), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4), st.randoms(use_true_random=False))
def test_mutated_metadata_raises_only_our_errors(spm: bool, changes: dict[str, Any], random: Any) -> None:
    metadata = (spm_metadata(SPM) if spm else dict(SMOLLM_METADATA)) | changes
    for key, value in metadata.items():
        if isinstance(value, list) and value and random.random() < 0.3:
            metadata[key] = [random.choice(value) for _ in value]
    try:
        vocabulary = from_metadata(metadata, "m.gguf")
    except (ModelFormatError, UnsupportedModelError) as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right
        return
    vocabulary.backend.decode(vocabulary.backend.encode("Hello 12 <|im_end|>").ids)

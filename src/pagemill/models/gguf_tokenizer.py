"""Tokenizers from a vocabulary alone: that of a GGUF file's metadata, or of a SentencePiece ``tokenizer.model``.

Owns turning (pieces, scores or merges, types) into a ``tokenizers`` pipeline that gives the same ids as the model's own
tokenizer. Must not read files. Byte-level BPE ("gpt2") follows its pre-tokenizer kind; SentencePiece BPE ("llama")
falls back to bytes and knows the leading space. CONTROL and USER_DEFINED pieces match whole before BPE.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pagemill.errors import ModelFormatError, UnsupportedModelError
from pagemill.models.pretokenizers import DEFAULT_KIND, kind_of

__all__ = ["PieceType", "Vocabulary", "from_metadata", "from_sentencepiece"]

logger = logging.getLogger(__name__)

SPACE = "▁"  # how SentencePiece writes a space

END_OF_TURN = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <|eom_id|> <EOT> [EOT] </s> "
    "<｜end▁of▁sentence｜> <end_of_utterance> <|END_OF_TURN_TOKEN|> <|return|> <|endofturn|>".split()
)
"""CONTROL pieces that end a turn or a text, by name: a GGUF file names one end-of-text id, a model may have more."""


class PieceType(IntEnum):
    """What a piece is, in SentencePiece's and GGUF's numbering."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer and what is to be added around a text."""

    backend: Tokenizer
    size: int
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    add_bos: bool
    add_eos: bool
    end_ids: tuple[int, ...]
    """All ids that end a text or a turn."""
    chat_template: str | None = None


def from_metadata(metadata: Mapping[str, Any], where: str) -> Vocabulary:
    """The tokenizer of a GGUF file. Raises ModelFormatError or UnsupportedModelError, naming ``where``."""
    get = _Fields(metadata, where)
    model = get.text("model")
    tokens = _unique(get.strings("tokens"))
    types = get.numbers("token_type", len(tokens)) or [PieceType.NORMAL] * len(tokens)
    special = {name: get.token_id(f"{name}_token_id", len(tokens)) for name in SPECIAL_IDS}
    if model == "gpt2":
        backend, add_bos = _byte_level(get, tokens, types)
    elif model == "llama":
        scores = get.numbers("scores", len(tokens))
        if scores is None:
            raise ModelFormatError(f"{where} has a SentencePiece vocabulary without tokenizer.ggml.scores")
        backend = sentencepiece_bpe(
            tokens, scores, types, unk_id=special["unknown"], add_prefix=get.flag("add_space_prefix", True)
        )
        add_bos = True
    else:
        raise UnsupportedModelError(f"{where} has a tokenizer of kind {model!r}; gpt2 and llama can be read")
    ends = [special["eos"], special["eot"], special["eom"]]
    ends += [index for index, token in enumerate(tokens) if types[index] == PieceType.CONTROL and token in END_OF_TURN]
    template = metadata.get("tokenizer.chat_template")
    return Vocabulary(
        backend=backend,
        size=len(tokens),
        bos_id=special["bos"],
        eos_id=special["eos"],
        unk_id=special["unknown"],
        pad_id=special["padding"],
        add_bos=get.flag("add_bos_token", add_bos),
        add_eos=get.flag("add_eos_token", False),
        end_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        chat_template=template if isinstance(template, str) else None,
    )


SPECIAL_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")


class _Fields:
    """Typed access to ``tokenizer.ggml.*``."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata = metadata
        self.where = where

    def _get(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def _wrong(self, name: str, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self.where}: tokenizer.ggml.{name} is {what}; the file is incomplete or corrupt")

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "missing" if value is None else "not a string")
        return value

    def strings(self, name: str) -> list[str]:
        value = self._get(name)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "not a list of strings")
        return value

    def numbers(self, name: str, count: int) -> list[float] | None:
        value = self._get(name)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(isinstance(item, int | float) for item in value)
        ):
            raise self._wrong(name, f"not a list of {count} numbers")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name)
        return default if value is None else bool(value)

    def token_id(self, name: str, size: int) -> int | None:
        """An id that no token has is ignored, with a warning: some converters wrote -1 or the padded size."""
        value = self._get(name)
        if value is None or (isinstance(value, int) and 0 <= value < size):
            return value
        logger.warning("%s: tokenizer.ggml.%s=%r is not one of %d tokens; ignored", self.where, name, value, size)
        return None


def _unique(tokens: Sequence[str]) -> list[str]:
    """Pieces, with a stand-in for each that is empty or was there before: text never maps to these."""
    seen: set[str] = set()
    result = []
    for index, token in enumerate(tokens):
        name = token if token and token not in seen else f"<|unnamed {index}|>"
        seen.add(name)
        result.append(name)
    return result


def _byte_level(get: _Fields, tokens: list[str], types: Sequence[float]) -> tuple[Tokenizer, bool]:
    name = get.metadata.get("tokenizer.ggml.pre")
    kind = kind_of(name) if isinstance(name, str) else None
    if kind is None:
        logger.warning(
            "%s: pre-tokenizer %r is not known, so the default is used; token ids may differ from the model's own and "
            "answers may be worse (convert the model again with a current llama.cpp)",
            get.where,
            name,
        )
        kind = DEFAULT_KIND
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in get.strings("merges"))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind.ignore_merges)
    except Exception as error:
        raise ModelFormatError(f"{get.where}: its merges do not fit its tokens ({error})") from error
    backend = Tokenizer(model)
    normalizer = kind.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = kind.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    _add_whole_pieces(backend, tokens, types)
    return backend, kind.add_bos


def _add_whole_pieces(backend: Tokenizer, tokens: Sequence[str], types: Sequence[float]) -> None:
    """Pieces that match whole, before anything else; CONTROL ones are left out of text when special ones are."""
    added = [
        AddedToken(token, special=kind != PieceType.USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (PieceType.CONTROL, PieceType.UNKNOWN, PieceType.USER_DEFINED) and SPACE * len(token) != token
    ]
    backend.add_tokens(added)


def sentencepiece_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[float],
    *,
    unk_id: int | None,
    add_prefix: bool,
    charsmap: bytes = b"",
) -> Tokenizer:
    """SentencePiece's BPE: of all neighbours, join those whose union has the best score, leftmost first."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges(tokens, scores, types),
        unk_token=tokens[unk_id] if unk_id is not None else None,
        fuse_unk=True,
        byte_fallback=PieceType.BYTE in types,
    )
    backend = Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    steps += [normalizers.Prepend(SPACE)] if add_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    runs = [token for token, kind in zip(tokens, types, strict=True) if kind == PieceType.USER_DEFINED]
    runs = sorted((token for token in runs if SPACE * len(token) == token), key=len, reverse=True)
    if runs:  # whole runs of spaces: seen only after spaces were written as SPACE
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(runs)), "isolated")
    undo: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if add_prefix else undo)
    _add_whole_pieces(backend, tokens, types)
    return backend


def _merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a piece out of two, the best-scored piece first."""
    usable = (PieceType.NORMAL, PieceType.USER_DEFINED)
    score = {token: value for token, value, kind in zip(tokens, scores, types, strict=True) if kind in usable and token}
    rank = {token: index for index, token in enumerate(tokens)}
    found = []
    for token, value in score.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in score and right in score:
                found.append((-value, rank[left], rank[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def from_sentencepiece(data: bytes, where: str) -> Vocabulary:
    """The tokenizer of a SentencePiece model file (protocol buffer ``ModelProto``)."""
    try:
        pieces, trainer, normalizer = _read_model_proto(data)
        special = {name: bytes(trainer.get(field, text)).decode() for name, field, text in SPM_SPECIAL}
        charsmap = bytes(normalizer.get(2, b""))
    except (IndexError, KeyError, AttributeError, TypeError, ValueError, struct.error) as error:
        raise ModelFormatError(f"{where} is not a SentencePiece model ({error!r}); fetch it again") from error
    if not pieces:
        raise ModelFormatError(f"{where} is not a SentencePiece model: it has no pieces; fetch it again")
    if trainer.get(3, 1) != BPE_MODEL:
        raise UnsupportedModelError(
            f"{where} is a SentencePiece model of type {trainer.get(3, 1)}; without a tokenizer.json only BPE (2) works"
        )
    tokens = _unique([piece for piece, _, _ in pieces])
    types = [kind for _, _, kind in pieces]
    backend = sentencepiece_bpe(
        tokens,
        [score for _, score, _ in pieces],
        types,
        unk_id=types.index(PieceType.UNKNOWN) if PieceType.UNKNOWN in types else None,
        add_prefix=bool(normalizer.get(3, 1)),
        charsmap=charsmap,
    )
    ids = {name: backend.token_to_id(text) for name, text in special.items()}
    return Vocabulary(
        backend=backend,
        size=len(tokens),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        unk_id=ids["unk"],
        pad_id=ids["pad"],
        add_bos=True,
        add_eos=False,
        end_ids=() if ids["eos"] is None else (ids["eos"],),
    )


BPE_MODEL = 2
SPM_SPECIAL = (("unk", 45, b"<unk>"), ("bos", 46, b"<s>"), ("eos", 47, b"</s>"), ("pad", 48, b"<pad>"))
"""TrainerSpec's fields that name the special pieces."""


def _read_model_proto(data: bytes) -> tuple[list[tuple[str, float, int]], dict[int, Any], dict[int, Any]]:
    """Pieces (1: text, 2: score, 3: type), trainer (2) and normalizer (3) specifications."""
    pieces: list[tuple[str, float, int]] = []
    specs: dict[int, dict[int, Any]] = {2: {}, 3: {}}
    for field, value in _fields(data):
        if field == 1:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece.get(2, bytes(4)))[0]
            pieces.append((piece[1].decode(), score, piece.get(3, PieceType.NORMAL)))
        elif field in specs:
            specs[field] = dict(_fields(value))
    return pieces, specs[2], specs[3]


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protocol buffer message: varints as int, everything else as bytes."""
    if not isinstance(data, bytes):
        raise ValueError("a message was expected")
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > len(data):
            raise ValueError(f"a field of {size} bytes at byte {at} of {len(data)}")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"an endless number at byte {at}")

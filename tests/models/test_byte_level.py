"""A text has no fewer tokens than is said of it, and nothing is said where tokens may swallow text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pagemill.models.byte_level import TokenBound, byte_of_character

MERGES = [("a", "a"), ("aa", "aa"), ("Ġ", "a"), ("Ã", "©"), ("Ì", "ģ")]
CHARACTERS = st.sampled_from(
    ["a", "a", "aaaa", " ", "é", "e\u0301", "\x04", "<long one>", "\u212a", "α\u0313\u0301\u0345", "𝅘𝅥"]
)


def backend(lacks: str = "") -> Backend:
    """Byte-level BPE with tokens of up to four bytes, and an added one of ten."""
    pieces = [*sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(lacks)), *(a + b for a, b in MERGES)]
    made = Backend(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_tokens([AddedToken("<long one>", normalized=False)])
    return made


def normalized() -> Backend:
    made = backend()
    made.normalizer = normalizers.NFC()
    return made


@pytest.mark.parametrize("tokenizer", [backend(), backend(lacks="Ą"), normalized()], ids=["plain", "lacks", "NFC"])
@given(parts=st.lists(CHARACTERS, max_size=60))
def test_no_text_has_fewer_tokens(tokenizer: Backend, parts: list[str]) -> None:
    text = "".join(parts)
    assert TokenBound(tokenizer).min_tokens(text) <= len(tokenizer.encode(text))


def test_the_bound_is_the_longest_tokens() -> None:
    assert TokenBound(backend()).min_tokens("a" * 1000) == 100
    assert TokenBound(backend()).min_tokens("a" * 1001) == 101
    assert TokenBound(normalized()).min_tokens("a" * 1000) == 25


def test_bytes_that_the_vocabulary_lacks_do_not_count() -> None:
    tokenizer = backend(lacks="Ą")
    assert byte_of_character()["Ą"] == 4
    assert tokenizer.encode("\x04" * 50).ids == []
    assert TokenBound(tokenizer).min_tokens("\x04" * 50 + "a" * 50) == 5


def _stripping(made: Backend) -> None:
    made.add_tokens([AddedToken("<mask>", lstrip=True)])


def _removing(made: Backend) -> None:
    split = pre_tokenizers.Split(" ", "removed")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _replacing(made: Backend) -> None:
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "")])


def _plain(made: Backend) -> None:
    made.pre_tokenizer = pre_tokenizers.Whitespace()


@pytest.mark.parametrize("change", [_stripping, _removing, _replacing, _plain])
def test_nothing_is_known_where_text_can_vanish(change: Callable[[Any], None]) -> None:
    made = backend()
    change(made)
    assert TokenBound(made).min_tokens("a" * 10_000) == 0


def test_nothing_is_known_of_whole_words() -> None:
    made = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert TokenBound(made).min_tokens("a" * 10_000) == 0


def test_composing_shortens_no_character_by_more_than_is_reckoned_with() -> None:
    composed = normalizers.NFC()
    for code in range(0x110000):
        if not 0xD800 <= code < 0xE000:
            character = chr(code)
            assert len(character.encode()) <= 3 * len(composed.normalize_str(character).encode()), hex(code)

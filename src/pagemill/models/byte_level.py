"""Tokenizers whose tokens are the text's own bytes: how a byte is written, and how few tokens a text can have.

Owns the lower bound by which a text that is far too long is refused without being tokenised, and for which tokenizers
there is one. Those that drop or join characters (WordPiece, SentencePiece's normalisation, tokens that take in the
space around them) have none.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer as Backend

__all__ = ["TokenBound", "byte_of_character"]

NFC_SHRINKS = 4
"""Composing characters makes a text shorter, by a factor of 3 at most (three marks on a Greek letter)."""
KEEPING = frozenset({"ByteLevel", "Digits", "Split"})
"""Pre-tokenizers that can keep every character."""
NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's way to write each byte as a printable character: the printable ones of Latin-1 as they are."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenBound:
    """The bound for one tokenizer; 0 where none is known."""

    def __init__(self, backend: Backend) -> None:
        normalizer = _parts(backend.normalizer, "normalizers")
        steps = _parts(backend.pre_tokenizer, "pretokenizers")
        vocabulary = backend.get_vocab(with_added_tokens=False)
        added = list(backend.get_added_tokens_decoder().values())
        unknown = {byte for character, byte in byte_of_character().items() if character not in vocabulary}
        keeps = (
            type(backend.model).__name__ == "BPE"
            and all(step["type"] == "NFC" for step in normalizer)
            and any(step["type"] == "ByteLevel" for step in steps)
            and all(step["type"] in KEEPING and step.get("behavior") != "Removed" for step in steps)
            and not any(token.lstrip or token.rstrip for token in added)
            and not (normalizer and unknown - NEVER_IN_UTF8)
        )
        self._dropped = bytes(unknown)
        """Bytes that the vocabulary lacks, some of which large corpora hardly have, are passed over."""
        self._most_bytes = 0
        """Of text that one token can stand for."""
        if keeps:
            longest = max(map(len, [*vocabulary, *(token.content.encode() for token in added)]))
            self._most_bytes = longest * (NFC_SHRINKS if normalizer else 1)

    def min_tokens(self, text: str) -> int:
        """No tokenisation of this text has fewer."""
        if not self._most_bytes:
            return 0
        size = len(text.encode(errors="replace").translate(None, self._dropped))
        return -(-size // self._most_bytes)


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """A part of a tokenizer as data, a sequence of parts taken apart."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return list(state[name]) if state["type"] == "Sequence" else [state]

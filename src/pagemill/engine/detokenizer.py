"""Token ids to text, one at a time: whole code points only, and stop strings that never leak.

Owns the bytes between two code points and the characters held back because they may be the start of a stop string.
Must not know requests. Invariant: the pieces handed out, joined, are a prefix of the whole sequence's text, and all of
it once the stream is closed. Each token costs amortised constant time.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["Detokenizer", "StopStrings", "TokenBytes", "Vocabulary"]

_UTF8 = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """The part of a tokenizer that turning ids into text needs."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are not text, such as end-of-text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, which may be part of a code point only."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""


class Vocabulary:
    """Each token's own text, looked up once. One per tokenizer, shared by all requests."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self.special_ids = tokenizer.special_ids
        self.texts: dict[int, str | None] = {}
        """Filled as tokens appear; None: the token is not whole code points by itself."""
        self._strips_leading_space: bool | None = None

    def text(self, token_id: int) -> str | None:
        """The token's own text, or None where its bytes are only part of a code point."""
        try:
            return self.texts[token_id]
        except KeyError:
            found: str | None
            try:
                found = self._tokenizer.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                found = None
            self.texts[token_id] = found
            return found

    def raw(self, token_id: int) -> bytes:
        """The token's own bytes."""
        return self._tokenizer.token_bytes(token_id)

    def shown(self, token_id: int) -> str:
        """The token's own text for people: bytes that are no text show as U+FFFD."""
        text = self.text(token_id)
        return self.raw(token_id).decode(errors="replace") if text is None else text

    def strips_leading_space(self, token_id: int) -> bool:
        """Whether a text that starts with this token drops the space before it, as SentencePiece does."""
        text = self.text(token_id)
        if text is None or not text.startswith(" "):
            return False
        if self._strips_leading_space is None:
            self._strips_leading_space = not self._tokenizer.decode([token_id], skip_special_tokens=False).startswith(
                text
            )
        return self._strips_leading_space


class Detokenizer:
    """The text of one growing sequence.

    ``at_start`` says that no text stands before the sequence, so that SentencePiece's leading space is dropped.
    """

    __slots__ = ("_at_start", "_decoder", "_skip_special", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True, at_start: bool = False) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special_tokens
        self._at_start = at_start
        self._decoder: codecs.IncrementalDecoder | None = None
        """Present while bytes of an unfinished code point wait."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete, which may be empty."""
        texts = self._vocabulary.texts
        parts = []
        for token_id in token_ids:
            text = texts.get(token_id)
            if text is None or self._decoder is not None or self._at_start or token_id in self._vocabulary.special_ids:
                text = self._feed_slowly(token_id)
            parts.append(text)
        return parts[0] if len(parts) == 1 else "".join(parts)

    def _feed_slowly(self, token_id: int) -> str:
        vocabulary = self._vocabulary
        if self._skip_special and token_id in vocabulary.special_ids:
            return ""
        text = vocabulary.text(token_id)
        at_start, self._at_start = self._at_start, False
        if text is not None and self._decoder is None:
            strips = at_start and token_id not in vocabulary.special_ids and vocabulary.strips_leading_space(token_id)
            return text[1:] if strips else text
        if self._decoder is None:
            self._decoder = _UTF8("replace")
        text = self._decoder.decode(vocabulary.raw(token_id))
        if not self._decoder.getstate()[0]:
            self._decoder = None
        return text

    def close(self) -> str:
        """What is left at the end: an unfinished code point shows as U+FFFD."""
        if self._decoder is None:
            return ""
        text = self._decoder.decode(b"", True)
        self._decoder = None
        return text


class _StopAutomaton:
    """Aho and Corasick's automaton: one step a character, however many strings are looked for."""

    __slots__ = ("_edges", "_failures", "depths", "firsts", "matches")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._edges: dict[tuple[int, str], int] = {}
        self._failures = [0]
        self.depths = [0]
        """Per state, how much of the text's end it has matched."""
        self.matches: list[str | None] = [None]
        """Per state, the longest stop string that the text now ends with."""
        self.firsts = frozenset(stop[0] for stop in stops)
        children: list[list[tuple[str, int]]] = [[]]
        for stop in stops:
            state = 0
            for char in stop:
                following = self._edges.get((state, char))
                if following is None:
                    following = len(self.depths)
                    self._edges[state, char] = following
                    self._failures.append(0)
                    self.depths.append(self.depths[state] + 1)
                    self.matches.append(None)
                    children.append([])
                    children[state].append((char, following))
                state = following
            self.matches[state] = stop
        pending = [state for _, state in children[0]]
        for state in pending:  # by depth: it grows while it is walked
            for char, child in children[state]:
                self._failures[child] = self.step(self._failures[state], char)
                pending.append(child)
            self.matches[state] = self.matches[state] or self.matches[self._failures[state]]

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while (following := self._edges.get((state, char))) is None:
            if not state:
                return 0
            state = self._failures[state]
        return following


_automaton = functools.lru_cache(maxsize=64)(_StopAutomaton)
"""Completions of one request share theirs, and so do requests with the same stop strings."""


class StopStrings:
    """Finds the first stop string in a growing text and holds back only what may be the start of one.

    The string that is complete first wins (of two that end together, the longer), however the text is cut into pieces.
    """

    __slots__ = ("_held", "_state", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; no more text may be fed then."""

    def feed(self, text: str, *, include: bool = False) -> str:
        """The text that can be shown now. With ``include`` the stop string itself is shown too."""
        automaton = _automaton(self._stops)
        if not self._held and automaton.firsts.isdisjoint(text):
            return text
        whole, state = self._held + text, self._state
        for position in range(len(self._held), len(whole)):
            state = automaton.step(state, whole[position])
            self.matched = automaton.matches[state]
            if self.matched is not None:
                end = position + 1
                self._held = ""
                return whole[:end] if include else whole[: end - len(self.matched)]
        self._state = state
        safe = len(whole) - automaton.depths[state]
        self._held = whole[safe:]
        return whole[:safe]

    def close(self) -> str:
        """What was held back, once the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

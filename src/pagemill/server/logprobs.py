"""Log probabilities in OpenAI's two formats: lists of parallel columns (completions), list of objects (chat).

Owns token texts whose concatenation is the text, and their offsets. Minus infinity is -9999.0: JSON has no infinity.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from pagemill.models.tokenizer import Tokenizer
from pagemill.params import Logprob

__all__ = ["LEAST", "TokenTexts", "chat_logprobs", "completion_logprobs", "prompt_logprobs"]

LEAST = -9999.0


def clamped(value: float) -> float:
    """A number that JSON can hold."""
    return value if value > LEAST else LEAST  # also for NaN, which compares false


class TokenTexts:
    """Each token's own part of a text, and where it begins: the parts join to the text.

    A character that spans several tokens belongs to the one that completes it; tokens that the text leaves out
    (skipped specials, a BOS that the caller did not write) have the empty text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._offset = 0

    def of_prompt(self, token_ids: Sequence[int], text: str) -> list[tuple[str, int]]:
        """(text, offset) of a prompt's tokens, where the prompt reads ``text``."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        parts = [decoder.decode(self._tokenizer.token_bytes(token_id)) for token_id in token_ids]
        excess = sum(map(len, parts)) - len(text)
        if excess > 0 and "".join(parts).endswith(text):
            parts = _without_first(parts, excess)
        return self._placed(parts)

    def of_output(self, token_ids: Sequence[int], candidates: Sequence[dict[int, Logprob]]) -> list[tuple[str, int]]:
        """(text, offset) of produced tokens; their candidates carry the text that each one completed."""
        parts = []
        for token_id, found in zip(token_ids, candidates, strict=False):
            parts.append("" if token_id in self._skipped else found[token_id].decoded_token or "")
        return self._placed(parts)

    def _placed(self, parts: list[str]) -> list[tuple[str, int]]:
        placed = []
        for part in parts:
            placed.append((part, self._offset))
            self._offset += len(part)
        return placed


def _without_first(parts: list[str], excess: int) -> list[str]:
    """Drop the first ``excess`` characters."""
    kept = []
    for part in parts:
        kept.append(part[excess:])
        excess = max(0, excess - len(part))
    return kept


def completion_logprobs(
    positions: Sequence[dict[int, Logprob] | None],
    token_ids: Sequence[int],
    placed: Sequence[tuple[str, int]],
    *,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Columns over tokens. A position without candidates (a prompt's first token) has null."""
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, candidates, (text, _) in zip(token_ids, positions, placed, strict=True):
        if candidates is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(clamped(candidates[token_id].logprob))
        top: dict[str, float] = {}
        for other, candidate in candidates.items():
            shown = text if other == token_id else (candidate.decoded_token or "")
            shown = _as_id(other) if as_ids else shown
            top.setdefault(shown, clamped(candidate.logprob))
        tops.append(top)
    return {
        "tokens": [_as_id(token_id) for token_id in token_ids] if as_ids else [text for text, _ in placed],
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": [offset for _, offset in placed],
    }


def chat_logprobs(
    positions: Sequence[dict[int, Logprob]],
    token_ids: Sequence[int],
    num_top: int,
    tokenizer: Tokenizer,
    *,
    listed: Sequence[int] = (),
    as_ids: bool = False,
) -> dict[str, Any]:
    """One object per token, each with its ``num_top`` best candidates, or those that are ``listed``."""
    content = []
    for token_id, candidates in zip(token_ids, positions, strict=True):
        best = sorted(candidates, key=lambda each: candidates[each].rank)[:num_top]
        item, *top = [
            _chat_token(each, candidates[each], tokenizer, as_id=as_ids) for each in (token_id, *(listed or best))
        ]
        content.append(item | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _as_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _chat_token(token_id: int, candidate: Logprob, tokenizer: Tokenizer, *, as_id: bool) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    text = _as_id(token_id) if as_id else candidate.decoded_token
    if text is None:
        text = raw.decode("utf-8", "replace")
    return {"token": text, "logprob": clamped(candidate.logprob), "bytes": list(raw)}


def prompt_logprobs(positions: Sequence[dict[int, Logprob] | None]) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's ``prompt_logprobs``: per prompt token, candidates by token id."""
    return [
        None
        if candidates is None
        else {
            str(token_id): {
                "logprob": clamped(candidate.logprob),
                "rank": candidate.rank,
                "decoded_token": candidate.decoded_token,
            }
            for token_id, candidate in candidates.items()
        }
        for candidates in positions
    ]

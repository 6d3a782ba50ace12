"""What changes logits before a token is chosen, one small object a kind.

Each processor keeps a side table of the rows that asked for it and touches no other row: a step pays for the rows
that use a feature, and a row's logits never depend on its neighbours. Token ids outside the vocabulary are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pagemill.sampling.table import RowRequest

__all__ = [
    "AllowedTokens",
    "BadWords",
    "LogitBias",
    "LogitsProcessor",
    "MinTokens",
    "Penalties",
    "default_processors",
]

Rows = NDArray[np.int64]
T = TypeVar("T")


class LogitsProcessor(Protocol):
    """Changes the logits of the rows that it was told to."""

    def add(self, row: int, request: RowRequest) -> None:
        """A request takes ``row``; keep what it needs, if it needs anything."""

    def remove(self, row: int) -> None:
        """The row is free again."""

    def wants(self, row: int) -> bool:
        """Whether this row's logits would be changed now or later."""

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        """Change logits [R, V] in place; ``rows`` [R] says which permanent row each one is."""

    def accept(self, rows: Rows, token_ids: Rows) -> None:
        """These rows got these tokens, [R] and [R]."""


def default_processors(vocab_size: int) -> tuple[LogitsProcessor, ...]:
    """All kinds, in the order in which they apply."""
    return (
        AllowedTokens(vocab_size),
        BadWords(vocab_size),
        MinTokens(vocab_size),
        LogitBias(vocab_size),
        Penalties(vocab_size),
    )


class _SideTable(Generic[T]):
    """Entries by row."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._entries: dict[int, T] = {}

    def remove(self, row: int) -> None:
        self._entries.pop(row, None)

    def wants(self, row: int) -> bool:
        return row in self._entries

    def accept(self, rows: Rows, token_ids: Rows) -> None:
        pass

    def _among(self, rows: Rows) -> list[tuple[int, T]]:
        """(index within the step, entry) of the step's rows that have one."""
        if not self._entries:
            return []
        return [(i, self._entries[row]) for i, row in enumerate(rows.tolist()) if row in self._entries]

    def _known(self, token_ids: Iterable[int]) -> list[int]:
        return sorted({token for token in token_ids if 0 <= token < self._vocab_size})


def _at(logits: torch.Tensor, places: list[tuple[int, NDArray[np.int64]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Index pair into logits for (row of the step, its token ids) of each."""
    index = np.repeat([i for i, _ in places], [len(ids) for _, ids in places])
    tokens = np.concatenate([ids for _, ids in places])
    return torch.from_numpy(index).to(logits.device), torch.from_numpy(tokens).to(logits.device)


class AllowedTokens(_SideTable[NDArray[np.int64]]):
    """``allowed_token_ids``: everything else is forbidden."""

    def add(self, row: int, request: RowRequest) -> None:
        if request.params.allowed_token_ids is not None:
            self._entries[row] = np.array(self._known(request.params.allowed_token_ids), np.int64)

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        for i, ids in self._among(rows):
            allowed = torch.from_numpy(ids).to(logits.device)
            kept = logits[i, allowed]
            logits[i] = -torch.inf
            logits[i, allowed] = kept


@dataclass(slots=True, eq=False)
class _Banned:
    single: list[int]
    """Words of one token: never."""
    longer: dict[tuple[int, ...], list[int]]
    """All tokens but the last -> last tokens."""
    lengths: list[int]
    """Of those beginnings, ascending."""
    tail: list[int]
    """End of the output, as long as the longest first part."""


class BadWords(_SideTable[_Banned]):
    """``bad_words``: the last token of a forbidden sequence is forbidden once the rest stands in the output."""

    def add(self, row: int, request: RowRequest) -> None:
        words = [word for word in request.bad_words if word and all(0 <= t < self._vocab_size for t in word)]
        if words:
            longer: dict[tuple[int, ...], list[int]] = {}
            for word in words:
                if len(word) > 1:
                    longer.setdefault(word[:-1], []).append(word[-1])
            produced = request.token_ids[request.num_prompt_tokens :].tolist()
            single = [word[0] for word in words if len(word) == 1]
            self._entries[row] = _Banned(single, longer, sorted({len(first) for first in longer}), produced)

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        for i, entry in self._among(rows):
            banned = set(entry.single)
            for length in entry.lengths:
                banned.update(entry.longer.get(tuple(entry.tail[-length:]), ()))
            logits[i, sorted(banned)] = -torch.inf

    def accept(self, rows: Rows, token_ids: Rows) -> None:
        for i, entry in self._among(rows):
            if entry.lengths:
                entry.tail = [*entry.tail, int(token_ids[i])][-entry.lengths[-1] :]


@dataclass(slots=True, eq=False)
class _Suppressed:
    token_ids: NDArray[np.int64]
    remaining: int
    """Output tokens still to come before these may be produced."""


class MinTokens(_SideTable[_Suppressed]):
    """``min_tokens``: every id that would end the output is forbidden until so many tokens are out."""

    def add(self, row: int, request: RowRequest) -> None:
        params = request.params
        remaining = params.min_tokens - (len(request.token_ids) - request.num_prompt_tokens)
        ids = self._known(params.stop_token_ids if params.ignore_eos else params.stop_token_ids + request.eos_token_ids)
        only_ends = params.allowed_token_ids is not None and set(self._known(params.allowed_token_ids)) <= set(ids)
        if remaining > 0 and ids and not only_ends:  # where only ends are allowed, nothing would be left
            self._entries[row] = _Suppressed(np.array(ids, np.int64), remaining)

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        if hits := [(i, entry.token_ids) for i, entry in self._among(rows)]:
            logits[_at(logits, hits)] = -torch.inf

    def accept(self, rows: Rows, token_ids: Rows) -> None:
        for i, entry in self._among(rows):
            entry.remaining -= 1
            if not entry.remaining:
                self.remove(int(rows[i]))


class LogitBias(_SideTable[tuple[NDArray[np.int64], NDArray[np.float32]]]):
    """``logit_bias``: added to these tokens' logits."""

    def add(self, row: int, request: RowRequest) -> None:
        bias = request.params.logit_bias
        if ids := self._known(bias):
            self._entries[row] = np.array(ids, np.int64), np.array([bias[token] for token in ids], np.float32)

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        if hits := self._among(rows):
            added = torch.from_numpy(np.concatenate([bias for _, (_, bias) in hits])).to(logits.device)
            places = _at(logits, [(i, ids) for i, (ids, _) in hits])
            logits[places] = logits[places] + added


class _Seen:
    """Distinct tokens of one request with how often each was produced; grows as it runs."""

    __slots__ = ("_count", "_ids", "_slots", "frequency", "presence", "repetition", "size")

    def __init__(self, request: RowRequest, vocab_size: int) -> None:
        params = request.params
        self.repetition = params.repetition_penalty
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        distinct = np.unique(request.token_ids)
        distinct = distinct[(distinct >= 0) & (distinct < vocab_size)]
        self.size = len(distinct)
        self._ids = np.zeros(2 * self.size + 64, np.int64)
        self._ids[: self.size] = distinct
        self._count = np.zeros(len(self._ids), np.float32)
        self._slots = {int(token): slot for slot, token in enumerate(distinct)}
        for token in request.token_ids[request.num_prompt_tokens :].tolist():
            self.add(token)

    def add(self, token: int) -> None:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = self.size
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._count = np.concatenate([self._count, np.zeros_like(self._count)])
            self._ids[slot] = token
            self.size += 1
        self._count[slot] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self.size]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Times produced; 0 for tokens of the prompt alone."""
        return self._count[: self.size]


class Penalties(_SideTable[_Seen]):
    """Repetition over prompt and output, then frequency and presence over the output."""

    def add(self, row: int, request: RowRequest) -> None:
        params = request.params
        if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._entries[row] = _Seen(request, self._vocab_size)

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        hits = self._among(rows)
        if not hits:
            return
        places = _at(logits, [(i, seen.ids) for i, seen in hits])
        sizes = [seen.size for _, seen in hits]

        def spread(values: list[float]) -> torch.Tensor:
            return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(logits.device)

        counts = torch.from_numpy(np.concatenate([seen.counts for _, seen in hits])).to(logits.device)
        repetition = spread([seen.repetition for _, seen in hits])
        picked = logits[places]
        picked = torch.where(picked > 0, picked / repetition, picked * repetition)
        picked = picked - spread([seen.frequency for _, seen in hits]) * counts
        logits[places] = picked - spread([seen.presence for _, seen in hits]) * (counts > 0)

    def accept(self, rows: Rows, token_ids: Rows) -> None:
        for i, seen in self._among(rows):
            seen.add(int(token_ids[i]))

"""How weights are cut over the ranks of a group.

Owns the shard rules; must not talk to other ranks (worker/parallel.py does). A rule is an attribute of a parameter, so
the loader can cut any matrix without knowing which layer it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pagemill.errors import ConfigError

__all__ = ["SOLO", "Group", "Shard", "SoloGroup", "share"]


class Group(Protocol):
    """The ranks that hold one model together."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""


@dataclass(frozen=True)
class SoloGroup:
    """Rank 0 of 1: every rule cuts nothing."""

    rank: int = 0
    size: int = 1


SOLO = SoloGroup()


class Shard(StrEnum):
    """Which part of a matrix [out_features, in_features] a rank holds."""

    WHOLE = "whole"
    ROWS = "rows"
    """A slice of the outputs (q, k, v, gate, up)."""
    COLUMNS = "columns"
    """A slice of the inputs (o, down); the ranks' products are summed."""


def share(length: int, group: Group, what: str) -> slice:
    """This rank's equal part of ``length`` rows, columns or heads; :class:`ConfigError` if it does not divide."""
    if length % group.size:
        raise ConfigError(f"{what}: {length} cannot be divided by {group.size} ranks; use a divisor of {length}")
    part = length // group.size
    return slice(group.rank * part, (group.rank + 1) * part)

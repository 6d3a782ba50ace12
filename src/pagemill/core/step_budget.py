"""How many tokens a step may hold, so that prompts do not hold up those who decode.

Owns the measured speed of steps. Pure: times are passed in. Answers do not depend on how prompts are cut, so the cuts
may follow the clock (Sarathi-Serve, Agrawal et al. 2024, takes a fixed number of tokens from a profile).
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.core.request import Request

__all__ = ["StepBudget"]

FEWEST = 64
"""Prompt tokens that a step may always hold: with fewer, weights are read for too little work."""
FIRST = 256
"""Prompt tokens beside decodes before any speed is known."""


class StepBudget:
    """Call :meth:`begin` before each step and :meth:`end` after it."""

    def __init__(self, max_num_batched_tokens: int, max_stall_s: float) -> None:
        """``max_stall_s``: how long a step with prompts may take while requests decode; 0: as long as it takes."""
        self._most = max_num_batched_tokens
        self._max_stall_s = max_stall_s
        self._token_s: float | None = None
        self._begun_s = 0.0

    def begin(self, running: Sequence[Request], now_s: float) -> int:
        """The most tokens of a step beside these requests: one for each of them at least."""
        self._begun_s = now_s
        decoding = any(len(request.token_ids) - request.num_computed_tokens == 1 for request in running)
        if not decoding or not self._max_stall_s:
            return self._most
        if self._token_s is None:
            return min(self._most, len(running) + FIRST)
        return min(self._most, max(len(running) + FEWEST, int(self._max_stall_s / self._token_s)))

    def end(self, num_tokens: int, now_s: float) -> None:
        """The step held so many tokens. Small ones tell nothing: they wait for the weights."""
        if num_tokens < FEWEST or now_s <= self._begun_s:
            return
        token_s = (now_s - self._begun_s) / num_tokens
        self._token_s = token_s if self._token_s is None else (self._token_s + token_s) / 2

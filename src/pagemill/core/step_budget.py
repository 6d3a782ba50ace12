"""How many tokens a step may hold, so that prompts do not hold up those who decode.

Owns the measured speed of steps. Pure: times are passed in. Answers do not depend on how prompts are cut, so the cuts
may follow the clock (Sarathi-Serve, Agrawal et al. 2024, takes a fixed number of tokens from a profile).
"""

from __future__ import annotations

__all__ = ["StepBudget"]

FEWEST = 64
"""Prompt tokens that a step may always hold: with fewer, weights are read for too little work."""
FIRST = 256
"""Prompt tokens beside decodes before any speed is known."""


class StepBudget:
    """Ask :meth:`most_tokens` before each step, and :meth:`note` how long it took."""

    def __init__(self, max_num_batched_tokens: int, max_stall_s: float) -> None:
        """``max_stall_s``: how long a step with prompts may take while requests decode; 0: as long as it takes."""
        self._most = max_num_batched_tokens
        self._max_stall_s = max_stall_s
        self._token_s: float | None = None

    def most_tokens(self, num_running: int, *, decoding: bool) -> int:
        """Of the next step: a token for each of the running requests at least."""
        if not decoding or not self._max_stall_s:
            return self._most
        if self._token_s is None:
            return min(self._most, num_running + FIRST)
        return min(self._most, max(num_running + FEWEST, int(self._max_stall_s / self._token_s)))

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long. Small ones tell nothing: they wait for the weights."""
        if num_tokens < FEWEST or seconds <= 0:
            return
        token_s = seconds / num_tokens
        self._token_s = token_s if self._token_s is None else (self._token_s + token_s) / 2

"""How often readers of streams are woken.

Writing one token to each of 64 readers 125 times a second costs a small machine a quarter of its time, which the model
would need. So wake-ups have a budget: few readers are woken for every token; when there are many, each finds a few
tokens at once. Owns who is due and when. First tokens and ends of streams are not its business: they never wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Pacer", "Reader"]

WAKES_PER_S = 1500
"""A wake-up costs about 30 µs here and as much in a client on the same machine; this many take 5 % of two cores."""
LONGEST_PAUSE_S = 0.05
"""No reader waits longer for text that is there."""


class Reader(Protocol):
    """Who waits for a stream's next piece."""

    def wake(self) -> None:
        """There is something to take."""


class Pacer:
    """Readers whose text is there and who were not told yet.

    ``call_later(delay_s, function)`` is the event loop's.
    """

    def __init__(self, clock: Callable[[], float], call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._clock = clock
        self._call_later = call_later
        self._due: list[Reader] = []
        self._woken_s = -1.0
        self._is_timed = False

    def add(self, reader: Reader) -> None:
        """Wake this reader with the next round."""
        self._due.append(reader)

    def pace(self) -> None:
        """Wake everyone who is due, now if the budget allows it, else as soon as it does."""
        if not self._due or self._is_timed:
            return
        pause_s = min(len(self._due) / WAKES_PER_S, LONGEST_PAUSE_S)
        wait_s = self._woken_s + pause_s - self._clock()
        if wait_s <= 0:
            self._wake()
        else:
            self._is_timed = True
            self._call_later(wait_s, self._wake)

    def _wake(self) -> None:
        due, self._due = self._due, []
        self._is_timed = False
        self._woken_s = self._clock()
        for reader in due:
            reader.wake()

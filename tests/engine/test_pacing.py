"""Few readers are woken for every token; many share a budget of wake-ups; nobody waits long."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagemill.engine.pacing import LONGEST_PAUSE_S, WAKES_PER_S, Pacer


class Loop:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        self.timers.append((self.now_s + delay_s, function))

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.timers and min(self.timers, key=lambda timer: timer[0])[0] <= end_s:
            timer = min(self.timers, key=lambda timer: timer[0])
            self.timers.remove(timer)
            self.now_s = max(self.now_s, timer[0])
            timer[1]()
        self.now_s = end_s


class Reader:
    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def run(num_readers: int, *, steps: int, step_s: float) -> tuple[list[Reader], Loop]:
    """Every step has something for every reader who is not due yet."""
    loop = Loop()
    pacer = Pacer(lambda: loop.now_s, loop.call_later)
    readers = [Reader() for _ in range(num_readers)]
    told = [0] * num_readers
    for _ in range(steps):
        for index, reader in enumerate(readers):
            if reader.woken == told[index]:
                told[index] += 1
                pacer.add(reader)
        pacer.pace()
        loop.advance(step_s)
    loop.advance(1.0)
    assert [reader.woken for reader in readers] == told
    return readers, loop


@pytest.mark.parametrize("num_readers", [1, 4, 8])
def test_a_few_readers_are_woken_for_every_token(num_readers: int) -> None:
    readers, _ = run(num_readers, steps=50, step_s=0.006)
    assert {reader.woken for reader in readers} == {50}


@pytest.mark.parametrize("num_readers", [32, 64])
def test_many_readers_stay_within_the_budget(num_readers: int) -> None:
    readers, _ = run(num_readers, steps=250, step_s=0.008)
    total = sum(reader.woken for reader in readers)
    assert total <= (2.0 + LONGEST_PAUSE_S) * WAKES_PER_S + num_readers
    assert total > 0.5 * 2.0 * WAKES_PER_S


def test_nobody_waits_longer_than_the_longest_pause() -> None:
    readers, _ = run(2000, steps=250, step_s=0.008)
    assert min(reader.woken for reader in readers) >= 2.0 / LONGEST_PAUSE_S * 0.5


def test_text_is_handed_on_although_no_further_step_comes() -> None:
    loop = Loop()
    pacer = Pacer(lambda: loop.now_s, loop.call_later)
    readers = [Reader() for _ in range(64)]
    for _ in range(2):
        for reader in readers:
            pacer.add(reader)
        pacer.pace()
    assert {reader.woken for reader in readers} == {1}
    loop.advance(LONGEST_PAUSE_S)
    assert {reader.woken for reader in readers} == {2}

"""The work that is measured, W1 to W4: seeded lengths, fresh text for every repetition.

Lengths come from fixed seeds and never change, so that figures of different engines and days compare. The text differs
per repetition, so that a prefix cache cannot answer one repetition from the one before; the last text is the warm-up.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["REPETITIONS", "Item", "Workload", "build"]

REPETITIONS = 10
"""Text sets; number REPETITIONS - 1 is kept for warming up."""

_VOCABULARY = tuple(
    """
apple bread bridge candle carpet castle chair circle city cloud coast corner country cousin dance doctor door
dream earth engine evening family farmer field finger fire flower forest friend garden ghost glass grain green
hammer harbor heart hill history honey horse house island journey kitchen ladder lake language lantern leaf
letter light machine market meadow message mirror moment morning mother mountain music needle night number
ocean orange painter paper pencil people picture planet pocket question rabbit rain river road rock sailor
school season shadow silver sister sky snow song spring star station stone storm story street summer sun table
teacher thread tower train tree valley village voice wall water weather wheel wind window winter wood word the
a of to and in that with from they she he we was were is are had has would could under over between after
before slowly quickly often never always almost together far near old young small great warm cold quiet bright
""".split()
)


@dataclass(frozen=True)
class Item:
    """One request: prompt token ids and how many tokens to produce (end-of-text is ignored)."""

    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests, and when each arrives in seconds after the start."""

    name: str
    items: list[Item]
    arrivals_s: list[float]
    streamed: bool


def build(name: str, encode: Callable[[str], list[int]], repetition: int, *, rate: float = 8.0) -> Workload:
    """Workload ``name`` (w1, w2, w3, w4) with the text of ``repetition``.

    w1: 64 requests at once, 32 to 256 tokens in and out. w2: one request, 128 in and out. w3: 32 requests with one
    common prefix of 1,024 tokens, 32 of their own, 32 out. w4: as w1 with 16 to 128 out, Poisson arrivals at ``rate``
    a second.
    """
    pairs = _mixed_lengths()
    if name == "w1":
        items = [Item(_prompt(encode, f"w1-{repetition}-{i}", n), out) for i, (n, out) in enumerate(pairs)]
        return Workload(name, items, [0.0] * len(items), streamed=False)
    if name == "w2":
        return Workload(name, [Item(_prompt(encode, f"w2-{repetition}", 128), 128)], [0.0], streamed=True)
    if name == "w3":
        prefix = _prompt(encode, f"w3-prefix-{repetition}", 1024)
        items = [Item(prefix + _prompt(encode, f"w3-{repetition}-{i}", 32), 32) for i in range(32)]
        return Workload(name, items, [0.0] * len(items), streamed=False)
    if name == "w4":
        lengths = random.Random(0)
        outputs = [lengths.randint(16, 128) for _ in pairs]
        items = [
            Item(_prompt(encode, f"w4-{rate}-{repetition}-{i}", n), out)
            for i, ((n, _), out) in enumerate(zip(pairs, outputs, strict=True))
        ]
        return Workload(f"w4@{rate:g}", items, _poisson(len(items), rate), streamed=True)
    raise ValueError(f"workload {name!r} is unknown; there are w1, w2, w3, w4")


def _mixed_lengths() -> list[tuple[int, int]]:
    lengths = random.Random(0)
    return [(lengths.randint(32, 256), lengths.randint(32, 256)) for _ in range(64)]


def _poisson(count: int, rate: float) -> list[float]:
    gaps = random.Random(0)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now / rate)
        now += gaps.expovariate(1.0)
    return times


def _prompt(encode: Callable[[str], list[int]], seed: str, num_tokens: int) -> list[int]:
    """Exactly ``num_tokens`` ids of word text."""
    rng = random.Random(seed)
    words: list[str] = []
    while len(words) < num_tokens + 20:
        sentence = rng.choices(_VOCABULARY, k=rng.randint(6, 14))
        words += [sentence[0].capitalize(), *sentence[1:-1], sentence[-1] + "."]
    ids = encode(" ".join(words))
    assert len(ids) >= num_tokens
    return ids[:num_tokens]

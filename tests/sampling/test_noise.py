"""The generator is the published one, and numbers depend on seed and position alone."""

import numpy as np

from pagemill.sampling.noise import philox, uniforms


def test_philox_gives_the_published_words() -> None:
    # Known-answer vectors of the Random123 distribution.
    counter = np.array([[0] * 4, [0xFFFFFFFF] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]], np.uint32)
    key = np.array([[0] * 2, [0xFFFFFFFF] * 2, [0xA4093822, 0x299F31D0]], np.uint32)
    assert [[f"{word:08x}" for word in words] for words in philox(counter, key)] == [
        ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"],
        ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"],
        ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"],
    ]


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    seeds, positions = np.arange(100, dtype=np.uint64) * 7, np.arange(100) * 3
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(100)]
    assert together.tolist() == alone


def test_numbers_are_spread_evenly_and_never_0_or_1() -> None:
    drawn = uniforms(np.zeros(100_000, np.uint64), np.arange(100_000))
    assert drawn.min() > 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, bins=50, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 85.4  # chi-square, 49 degrees of freedom, p = 0.001


def test_streams_seeds_and_positions_differ() -> None:
    one, two = np.array([1], np.uint64), np.array([2], np.uint64)
    place = np.array([5])
    assert len({*uniforms(one, place), *uniforms(two, place), *uniforms(one, place + 1), *uniforms(one, place, 1)}) == 4

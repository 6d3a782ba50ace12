"""Frames between two processes: whole, in order, and without waiting for the other side."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.engine.channel import LENGTH, Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    yield ours, other
    ours.close()
    other.close()


@given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(1, 400), min_size=1, max_size=20))
def test_frames_arrive_whole_and_in_order_however_the_bytes_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(Channel(ours)) as channel:
        stream = b"".join(LENGTH.pack(len(frame)) + frame for frame in frames)
        received = []
        for cut in itertools.cycle(cuts):
            theirs.sendall(stream[:cut])
            received += channel.receive()
            stream = stream[cut:]
            if not stream:
                break
        assert received == frames
        assert not channel.ended


def test_a_reader_that_is_slow_does_not_hold_up_the_sender(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    frames = [bytes([n]) * (1 << 20) for n in range(8)]
    for frame in frames:
        ours.send(frame)
    assert ours.has_unsent
    received: list[bytes] = []
    while len(received) < len(frames):
        received += theirs.receive()
        ours.wait(5.0)
        ours.flush()
    assert received == frames
    assert not ours.has_unsent


def test_both_directions_are_independent(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.send(b"question")
    theirs.send(b"")
    theirs.send(b"answer")
    assert theirs.receive() == [b"question"]
    assert ours.receive() == [b"", b"answer"]
    assert ours.receive() == []


def test_what_was_sent_before_the_end_is_received(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.send(b"unread")  # closing with this unread must not cost what was sent the other way
    theirs.send(b"last words")
    theirs.close()
    assert ours.receive() == [b"last words"]
    assert ours.ended
    assert ours.receive() == []


def test_sending_to_an_end_that_is_gone_says_so(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    theirs.close()
    with pytest.raises(ConnectionError):
        ours.send(b"hello")
    with pytest.raises(ConnectionError, match="closed"):
        theirs.send(b"hello")


def test_waiting_ends_when_something_arrives(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.wait(0.0)
    theirs.send(b"x")
    ours.wait(60.0)
    assert ours.receive() == [b"x"]

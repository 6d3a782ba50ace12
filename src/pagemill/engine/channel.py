"""Frames between the front and the engine process, over one Unix socket: a length, then so many bytes.

Owns the framing, and what the other side has not taken yet. Must not know what is in a frame. Neither end ever waits in
:meth:`Channel.send` or :meth:`Channel.receive`. A message queue's library would have a thread of its own at each end;
where the kernels fill every core, each of these threads has to be given one before a token can leave.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import deque

__all__ = ["Channel"]

LENGTH = struct.Struct("<Q")
READ_BYTES = 1 << 18


class Channel:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        self.ended = False
        """Whether the other end is closed and everything it sent has been received."""

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """This process's end, and one to be inherited by a child."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    @classmethod
    def inherited(cls, descriptor: int) -> Channel:
        """The end that a parent left; this process's children do not inherit it."""
        os.set_inheritable(descriptor, False)
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """To be watched for reading, and for writing while :attr:`has_unsent`."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits until the other side has taken more."""
        return bool(self._unsent)

    def send(self, frame: bytes) -> None:
        """Send a frame, now or as the other side takes it; ConnectionError where the other end is gone."""
        if self.fileno() < 0:
            raise ConnectionResetError("the channel is closed")
        self._unsent.append(memoryview(LENGTH.pack(len(frame)) + frame))
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes of what is unsent; ConnectionError where the other end is gone."""
        while self._unsent:
            first = self._unsent[0]
            try:
                sent = self._socket.send(first)
            except BlockingIOError:
                return
            if sent < len(first):
                self._unsent[0] = first[sent:]
            else:
                self._unsent.popleft()

    def receive(self) -> list[bytes]:
        """Every frame that has arrived whole."""
        while not self.ended:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:  # closed with our last frames unread
                data = b""
            self.ended = not data
            self._received += data
        frames = []
        start = 0
        while (body := start + LENGTH.size) <= len(self._received):
            end = body + LENGTH.unpack_from(self._received, start)[0]
            if end > len(self._received):
                break
            frames.append(bytes(self._received[body:end]))
            start = end
        del self._received[:start]
        return frames

    def wait(self, timeout_s: float) -> None:
        """Until something arrives or can be sent, or the time is over."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll(timeout_s * 1000)

    def close(self) -> None:
        """Close this end; frames that are unsent are lost."""
        self._socket.close()

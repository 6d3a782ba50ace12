"""The engine in a process of its own: how it is started, how it lives, and how its end is noticed.

Owns the child process on both sides: :class:`EngineProcess` for the front, :func:`main` for the child. The child
imports what is heavy before it is told what to do, so that it loads while the front resolves the model. It lives as
long as its standard input: the pipe closes when the front is gone, however it went, so no orphan stays. The front
learns of the child's end from the kernel, not from a time limit.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from io import RawIOBase
from pathlib import Path

import msgspec

from pagemill.config import EngineConfig
from pagemill.engine.channel import Channel
from pagemill.engine.wire import FromEngine, Ready, StartFailed, ToEngine, reported
from pagemill.errors import PagemillError

__all__ = ["EngineProcess", "Heartbeat", "StartOrder", "main"]

logger = logging.getLogger("pagemill.engine")

IDLE_S = 0.5
"""How often an idle engine shows that it lives."""
_LENGTH = struct.Struct("<Q")


class StartOrder(msgspec.Struct, kw_only=True):
    """Front -> child, once, over standard input: what to run."""

    config: EngineConfig
    heartbeat: str
    """File of :class:`Heartbeat`."""
    log_level: str = "info"


class Heartbeat:
    """The time of the engine's last sign of life, in memory that both processes see.

    A file of 8 bytes, mapped: beating costs no system call, and reading it needs no answer from the engine.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)

    @classmethod
    def create(cls, path: Path) -> Heartbeat:
        """Make the file and beat once."""
        path.write_bytes(bytes(8))
        heartbeat = cls(path)
        heartbeat.beat()
        return heartbeat

    def beat(self) -> None:
        """Still alive."""
        self._memory[:] = struct.pack("d", time.monotonic())

    def age_s(self) -> float:
        """Seconds since the last beat. The monotonic clock is the same in all processes of one machine."""
        (beaten_s,) = struct.unpack("d", self._memory[:])
        return float(max(0.0, time.monotonic() - beaten_s))


class EngineProcess:
    """The front's handle on the child."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self._process = process
        self.channel = channel
        """To the child; whoever uses it closes it once the child has ended."""
        self.ended: Future[int] = Future()
        """The exit code, as soon as the kernel knows it; negative for a signal."""
        threading.Thread(target=self._wait, name="pagemill-engine-wait", daemon=True).start()

    @classmethod
    def spawn(cls) -> EngineProcess:
        """Start the child. It imports and then waits for :meth:`order`, so call this as early as possible."""
        package_root = str(Path(__file__).resolve().parents[2])
        channel, theirs = Channel.pair()
        with theirs:
            code = (
                f"import sys; sys.path.insert(0, {package_root!r}); "
                f"from pagemill.engine.process import main; main({theirs.fileno()})"
            )
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C in the terminal is the front's to handle; it drains, then ends the child
            )
        return cls(process, channel)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def order(self, order: StartOrder) -> None:
        """Tell the child what to run. A child that is already gone shows in :attr:`ended`."""
        frame = msgspec.msgpack.encode(order)
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(_LENGTH.pack(len(frame)) + frame)
            pipe.flush()
        except (BrokenPipeError, ValueError):  # ValueError: the pipe was closed because the child has ended
            logger.debug("the engine process ended before it was told what to run")

    def signal_end(self) -> None:
        """End the child now; :attr:`ended` says when it has."""
        if not self.ended.done():
            self._process.kill()

    def kill(self) -> None:
        """End the child now, and wait for it."""
        self.signal_end()
        self.ended.result()

    def discard(self) -> None:
        """End a child that nobody talks to."""
        self.kill()
        self.channel.close()

    def _wait(self) -> None:
        code = self._process.wait()
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            logger.debug("the engine process ended with an order unread")
        self.ended.set_result(code)


def main(descriptor: int) -> None:
    """The child: import, wait for the order, load, serve until told to stop or the front is gone.

    ``descriptor`` is its end of the channel, inherited.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A service manager signals every process of the service; the front drains and then tells the engine to stop.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import pagemill.worker.executor  # noqa: F401  (heavy, and needed by every order)

    # Unbuffered: a thread that waits in a buffered reader would hold its lock when the interpreter ends.
    lifeline = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115  (stays open as long as the process)
    order = _read_order(lifeline)
    if order is None:
        return
    threading.Thread(target=_die_with_front, args=(lifeline,), name="pagemill-lifeline", daemon=True).start()
    logging.basicConfig(level=order.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    front = _Front(Channel.inherited(descriptor))
    try:
        _serve(order, front)
    except PagemillError as error:
        front.send(StartFailed(reported(error)))
        sys.exit(1)
    except Exception as error:
        logger.exception("the engine ends")
        front.send(StartFailed(reported(error)))
        sys.exit(1)


def _read_order(pipe: RawIOBase) -> StartOrder | None:
    """The front's order, or None if the front is gone before it gave one."""
    frame = b""
    wanted = _LENGTH.size
    while len(frame) < wanted:
        part = pipe.read(wanted - len(frame))
        if not part:
            return None
        frame += part
        if len(frame) == _LENGTH.size:
            wanted += _LENGTH.unpack(frame)[0]
    return msgspec.msgpack.decode(frame[_LENGTH.size :], type=StartOrder)


def _die_with_front(pipe: RawIOBase) -> None:
    """Nothing is written after the order: the read returns when the front's end of the pipe is gone."""
    pipe.read(1)
    os._exit(1)


class _Front:
    """The front, as the child sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        """One frame; never waits for the reader. A front that is gone needs none: this process is about to end."""
        with contextlib.suppress(ConnectionError):
            self._channel.send(self._encoder.encode(message))

    def receive(self) -> Iterable[ToEngine]:
        """Everything that has arrived."""
        return map(self._decoder.decode, self._channel.receive())

    def wait(self, timeout_s: float) -> None:
        """Until something arrives or more can be sent, or the time is over."""
        self._channel.wait(timeout_s)
        with contextlib.suppress(ConnectionError):
            self._channel.flush()


def _serve(order: StartOrder, front: _Front) -> None:
    from pagemill.engine.client import engine_facts
    from pagemill.engine.core import EngineCore
    from pagemill.worker.executor import InprocExecutor

    heartbeat = Heartbeat(Path(order.heartbeat))
    executor = InprocExecutor.create(order.config)
    core = EngineCore.create(order.config, executor, inbox=front.receive, sink=front.send)
    gc.collect()
    gc.freeze()  # what was made while loading stays; the collector need not walk it during steps
    heartbeat.beat()
    front.send(Ready(engine_facts(executor)))
    while not core.stopping:
        progressed = core.step()
        heartbeat.beat()
        if not progressed and not core.stopping:
            if order.log_level == "debug":
                core.scheduler.check_invariants()
            front.wait(IDLE_S)
    executor.shutdown()

"""How the front reaches the engine core: in its own thread, or in another process.

Owns the transport. Must not know text or requests' states: messages go in, steps' outputs come out through a callback.
:class:`InprocClient` is driven by its caller, :class:`ProcessClient` by the event loop; one of the latter lives as long
as one engine process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pagemill.config import EngineConfig
from pagemill.core.messages import EngineRequest
from pagemill.engine.process import EngineProcess, Heartbeat, StartOrder
from pagemill.engine.wire import (
    Abort,
    Add,
    Call,
    CallReply,
    EngineFacts,
    FromEngine,
    Ready,
    StartFailed,
    StepOutputs,
    Stop,
    ToEngine,
    raised,
)
from pagemill.errors import EngineDeadError

__all__ = ["EngineClient", "InprocClient", "ProcessClient", "engine_facts"]

logger = logging.getLogger("pagemill.engine")

STOP_S = 5.0
"""How long an engine that was told to stop may take."""


class EngineClient(Protocol):
    """What both kinds of client do."""

    @property
    def facts(self) -> EngineFacts:
        """What the engine said about itself."""

    def add(self, requests: list[EngineRequest]) -> None:
        """Start requests."""

    def abort(self, request_ids: list[str]) -> None:
        """Stop requests; unknown ids are ignored."""


def engine_facts(executor: Any) -> EngineFacts:
    """What the front must know about a loaded executor."""
    return EngineFacts(
        model_config=executor.model_config,
        max_model_len=executor.max_model_len,
        block_size=executor.kv_specs[0].block_size,
        num_blocks=sum(spec.num_blocks for spec in executor.kv_specs),
        memory_plan=executor.memory_plan.render(),
    )


class InprocClient:
    """The core in this thread; the caller drives it with :meth:`step`."""

    def __init__(self, config: EngineConfig, on_outputs: Callable[[StepOutputs], None]) -> None:
        from pagemill.engine.core import EngineCore
        from pagemill.worker.executor import InprocExecutor

        executor = InprocExecutor.create(config)
        self.facts = engine_facts(executor)
        self._inbox: list[ToEngine] = []
        self._replies: dict[int, CallReply] = {}
        self._on_outputs = on_outputs
        self.core = EngineCore.create(config, executor, inbox=self._take, sink=self._receive)

    def add(self, requests: list[EngineRequest]) -> None:
        """Start requests with the next step."""
        self._inbox.append(Add(requests))

    def abort(self, request_ids: list[str]) -> None:
        """Stop requests before the next step."""
        self._inbox.append(Abort(request_ids))

    def call(self, name: str, *args: Any) -> Any:
        """An admin operation, done now."""
        self._inbox.append(Call(0, name, list(args)))
        self.step()
        reply = self._replies.pop(0)
        if reply.error is not None:
            raise raised(reply.error)
        return reply.value

    def step(self) -> None:
        """One step of the core. An asynchronous executor's outputs come with the next one."""
        self.core.step()

    def shutdown(self) -> None:
        """Free the model."""
        self.core.executor.shutdown()

    def _take(self) -> list[ToEngine]:
        messages, self._inbox = self._inbox, []
        return messages

    def _receive(self, message: StepOutputs | CallReply) -> None:
        if isinstance(message, CallReply):
            self._replies[message.call_id] = message
        else:
            self._on_outputs(message)


class ProcessClient:
    """The core in a child process, for an asyncio front."""

    def __init__(self, process: EngineProcess, on_outputs: Callable[[StepOutputs], None]) -> None:
        self.process = process
        self._channel = process.channel
        self.on_outputs = on_outputs
        self._folder = Path(tempfile.mkdtemp(prefix="pagemill-"))
        self._heartbeat = Heartbeat.create(self._folder / "heartbeat")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        loop = self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineFacts] = loop.create_future()
        self.dead: asyncio.Future[str] = loop.create_future()
        """Why the process is gone, once it is."""
        self._last_words: tuple[str, str] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        loop.add_reader(self._channel, self._receive)
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        process: EngineProcess,
        config: EngineConfig,
        on_outputs: Callable[[StepOutputs], None],
        *,
        log_level: str = "info",
    ) -> ProcessClient:
        """Tell a fresh process what to run and wait until it does. Raises what the engine raised."""
        client = cls(process, on_outputs)
        process.order(
            StartOrder(
                config=config,
                heartbeat=str(client._folder / "heartbeat"),
                log_level=log_level,
            )
        )
        try:
            await asyncio.shield(client._ready)
        except BaseException:
            await client.shutdown(timeout_s=0.0)
            raise
        # Both have the heartbeat mapped: without a name in the file system nothing stays behind, however this one ends.
        shutil.rmtree(client._folder, ignore_errors=True)
        return client

    @property
    def facts(self) -> EngineFacts:
        """What the engine said about itself."""
        return self._ready.result()

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine's last step or idle beat."""
        return self._heartbeat.age_s()

    def add(self, requests: list[EngineRequest]) -> None:
        """Start requests."""
        self._send(Add(requests))

    def abort(self, request_ids: list[str]) -> None:
        """Stop requests before the next step."""
        if not self.dead.done():
            self._send(Abort(request_ids))

    async def call(self, name: str, *args: Any) -> Any:
        """An admin operation, done between two steps."""
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(Call(call_id, name, list(args)))
            return await answer
        finally:
            del self._calls[call_id]

    async def shutdown(self, *, timeout_s: float = STOP_S) -> None:
        """Stop the process; kill it when it does not stop in time."""
        if not self.process.ended.done() and timeout_s > 0:
            self._send(Stop())
            await asyncio.wait([asyncio.wrap_future(self.process.ended)], timeout=timeout_s)
        self.process.kill()
        await self._watching

    def _send(self, message: ToEngine) -> None:
        try:
            self._channel.send(self._encoder.encode(message))
        except ConnectionError:
            raise EngineDeadError("the engine process is gone; try again in a moment") from None
        if self._channel.has_unsent:
            self._loop.add_writer(self._channel, self._flush)

    def _flush(self) -> None:
        with contextlib.suppress(ConnectionError):  # told by the reader
            self._channel.flush()
            if self._channel.has_unsent:
                return
        self._loop.remove_writer(self._channel)

    async def _watch(self) -> None:
        """Wait until the process has ended, take in its last frames, and say so."""
        code = await asyncio.wrap_future(self.process.ended)
        self._receive()
        self._loop.remove_reader(self._channel)
        self._loop.remove_writer(self._channel)
        self._end(code)

    def _receive(self) -> None:
        """Hand on every frame that is there."""
        for frame in self._channel.receive():
            try:
                self._take(self._decoder.decode(frame))
            except Exception:
                logger.exception("the front cannot take in what the engine sent; the engine is stopped")
                self.process.signal_end()
                return
        if self._channel.ended:
            self._loop.remove_reader(self._channel)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self.on_outputs(message)
        elif isinstance(message, Ready):
            self._ready.set_result(message.facts)
        elif isinstance(message, StartFailed):
            self._last_words = message.error
        else:
            answer = self._calls.get(message.call_id)
            if answer is None or answer.done():
                return
            if message.error is None:
                answer.set_result(message.value)
            else:
                answer.set_exception(raised(message.error))

    def _end(self, code: int) -> None:
        self._channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        reason = f"the engine process ended ({_exit_text(code)})"
        if self._last_words is not None:
            reason += f": {self._last_words[1]}"
        if not self._ready.done():
            words = self._last_words
            self._ready.set_exception(EngineDeadError(reason + " while starting") if words is None else raised(words))
            self._ready.exception()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))
        if not self.dead.done():
            self.dead.set_result(reason)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, perhaps for lack of memory" if code == -signal.SIGKILL else name

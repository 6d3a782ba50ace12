"""One request's outputs, for ``async for``.

Owns the waiting of a reader. Must not know the engine's process: what is to be stopped goes to the front.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, Self

from pagemill.engine.output import OutputKind, RequestState
from pagemill.engine.pacing import Pacer
from pagemill.params import RequestOutput

__all__ = ["RequestStream"]


class Front(Protocol):
    """The part of the front that a stream needs."""

    pacer: Pacer

    def drop(self, state: RequestState) -> None:
        """Nobody reads this request any more."""


class RequestStream:
    """The outputs of one request, for ``async for``. What is not taken yet is merged, so a slow reader costs nothing.

    Iterating raises :class:`~pagemill.errors.PagemillError` where the engine could not finish the request. Call
    :meth:`close` when no more is wanted; a request that is not finished is then aborted within a step.
    """

    def __init__(self, engine: Front) -> None:
        self._engine = engine
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._begun = False
        self._due = False
        self.state: RequestState

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._ended:
            if self.state.error is not None:
                self.close()
                raise self.state.error
            output = self.state.take()
            if output is not None:
                self._ended = output.finished
                return output
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        raise StopAsyncIteration

    def note(self) -> None:
        """Something changed: the first piece and the end are told at once, what is between when it is its turn."""
        state = self.state
        if state.finished or state.error is not None:
            self.wake()
        elif state.kind is not OutputKind.FINAL and not self._due:
            if self._begun:
                self._due = True
                self._engine.pacer.add(self)
            else:
                self._begun = True
                self.wake()

    def wake(self) -> None:
        """There may be something to take."""
        self._due = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """No more is wanted."""
        self._ended = True
        self._engine.drop(self.state)

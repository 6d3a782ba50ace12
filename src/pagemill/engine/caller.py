"""On whose behalf work is done: set once where a request enters, read where it reaches the engine.

A context variable and not a parameter, so that no route can forget to pass it on: what a handler starts, in tasks and
threads too, belongs to the caller that the handler was entered with. Owns no decision; must not know HTTP.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["CALLER", "NOBODY", "Caller"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and how."""

    name: str = ""
    """What logs call the caller; the name of its API key. Never the key."""
    identity: bytes = b""
    """Differs for every API key, and says nothing of it; empty where none is asked for."""
    tenant: str = ""
    """Callers share cached prefixes only within a tenant."""
    route: str = ""
    """Where it came in."""
    address: str = ""
    """Its IP address, or its proxy's."""
    trace: tuple[tuple[str, str], ...] = ()
    """W3C trace context, as header names and values."""


NOBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("pagemill_caller", default=NOBODY)
"""The caller of the running task."""

"""Who goes first, and who makes room: an order of requests, whom to preempt, and who may push whom aside.

A policy is pure: it reads requests and the time it is given. Adding one (deadline, shortest first, fair share) means
writing a class like those below and naming it in :data:`POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pagemill.core.request import Request
from pagemill.errors import ConfigError

__all__ = ["POLICIES", "FirstComeFirstServed", "Policy", "PriorityFirst", "create_policy"]


class Policy(Protocol):
    """What the scheduler asks. Every order must be total: end each key with ``request.sequence``."""

    dynamic: bool
    """Keys change while requests wait or run; the scheduler asks for all of them again before each step."""

    def order(self, request: Request, now_s: float) -> tuple[float, ...]:
        """Sort key; the lowest goes first. Running requests are kept in this order too."""

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Whom of these running requests (best first) to preempt when blocks run out."""

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Whether ``waiting`` may take the place of ``running``. Must be a strict order, or they would swap forever."""


class FirstComeFirstServed:
    """In order of arrival; the latest comer makes room; nobody is pushed aside."""

    dynamic = False

    def order(self, request: Request, now_s: float) -> tuple[float, ...]:
        """By arrival."""
        return (request.sequence,)

    def victim(self, candidates: Sequence[Request]) -> Request:
        """The latest comer."""
        return candidates[-1]

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Never."""
        return False


class PriorityFirst(FirstComeFirstServed):
    """Lower ``priority`` first, then by arrival; a strictly better one pushes the worst aside."""

    def order(self, request: Request, now_s: float) -> tuple[float, ...]:
        """By priority, then arrival."""
        return (request.priority, request.sequence)

    def outranks(self, waiting: Request, running: Request) -> bool:
        """If its priority is strictly better."""
        return waiting.priority < running.priority


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": FirstComeFirstServed, "priority": PriorityFirst}


def create_policy(name: str) -> Policy:
    """The policy of this name; :class:`ConfigError` lists those that exist."""
    if name not in POLICIES:
        raise ConfigError(f"--scheduling-policy={name} does not exist; choose one of: {', '.join(POLICIES)}")
    return POLICIES[name]()

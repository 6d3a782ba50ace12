"""Every error that Pagemill raises on purpose.

::

    PagemillError
    ├── ConfigError               500  a flag or a combination of flags cannot work
    │   └── MemoryPlanError       500  the machine cannot hold even one request
    ├── ModelError                500  a model cannot be found, read or run
    │   ├── ModelNotFoundError    404  no model under this name
    │   ├── ModelFormatError      500  a file is corrupt, truncated or not what it claims
    │   └── UnsupportedModelError 500  an architecture or a feature of it is not implemented
    ├── RequestError              400  what the caller sent is wrong (carries ``param``)
    │   ├── PromptTooLongError    400  prompt (plus output) does not fit the context or the KV cache
    │   ├── NotFoundError         404  nothing is kept under this id
    │   ├── PayloadTooLargeError  413  the body is larger than the server reads
    │   └── QueueFullError        429  the server has as many requests waiting as it may
    └── EngineError               500  the engine failed, not the caller
        ├── NonFiniteLogitsError  500  the model produced NaN or infinity for this request
        ├── RequestTimeoutError   504  the request took longer than the server allows
        ├── EngineDeadError       503  the engine process is gone or starting again; retry
        └── ShuttingDownError     503  the server is draining; no new requests

A message is one line: what was given, what the limit is, and how to mend it.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "EngineDeadError",
    "EngineError",
    "MemoryPlanError",
    "ModelError",
    "ModelFormatError",
    "ModelNotFoundError",
    "NonFiniteLogitsError",
    "NotFoundError",
    "PagemillError",
    "PayloadTooLargeError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "RequestTimeoutError",
    "ShuttingDownError",
    "UnsupportedModelError",
    "did_you_mean",
]


class PagemillError(Exception):
    """Root of the tree. ``status`` is the HTTP status a server answers with."""

    status: int = 500


class ConfigError(PagemillError):
    """A flag or a combination of flags cannot work."""


class MemoryPlanError(ConfigError):
    """The memory that is there cannot hold the model and one request."""


class ModelError(PagemillError):
    """A model cannot be found, read or run."""


class ModelNotFoundError(ModelError):
    """No folder, file, hub id or served name matches."""

    status = 404


class ModelFormatError(ModelError):
    """A model file is corrupt, truncated or not what it claims to be."""


class UnsupportedModelError(ModelError):
    """The architecture, or a feature that the checkpoint asks for, is not implemented."""


class RequestError(PagemillError):
    """What the caller sent is wrong; ``param`` names the field, as OpenAI's error format does."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(RequestError):
    """The prompt, or the prompt and the requested output, does not fit."""


class NotFoundError(RequestError):
    """Nothing is kept under this id, or not for this caller."""

    status = 404


class PayloadTooLargeError(RequestError):
    """The request body is larger than the server reads."""

    status = 413


class QueueFullError(RequestError):
    """As many requests are waiting as the server may hold; ``retry_after_s`` says when to try again."""

    status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(PagemillError):
    """The engine failed, not the caller."""


class NonFiniteLogitsError(EngineError):
    """The model produced NaN or infinity for this request; only this request ends."""


class RequestTimeoutError(EngineError):
    """The request was not done within the server's limit; what it had is dropped."""

    status = 504


class EngineDeadError(EngineError):
    """The engine process is gone or is starting again; the request may be retried."""

    status = 503


class ShuttingDownError(EngineError):
    """The server is draining and takes no new requests."""

    status = 503


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """For the end of a message about an unknown name: the close ones, or nothing."""
    from difflib import get_close_matches  # only where something is wrong already

    close = get_close_matches(name, list(known), n=3, cutoff=0.7)
    return f"; did you mean {' or '.join(close)}?" if close else ""

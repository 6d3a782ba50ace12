"""Pagemill serves open-weight language models from paged KV memory.

The names in ``__all__`` are the public API. They are imported when they are first used, so that ``import pagemill`` is
cheap and torch is loaded only by who runs a model in this process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagemill import errors
    from pagemill.config import EngineConfig, ServerConfig
    from pagemill.engine.frontend import AsyncLLM
    from pagemill.engine.offline import LLM
    from pagemill.params import (
        BeamSearchParams,
        CompletionOutput,
        EmbeddingRequestOutput,
        FinishReason,
        Logprob,
        PoolingParams,
        RequestOutput,
        SamplingParams,
        ScoringRequestOutput,
        StructuredOutputsParams,
    )

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "FinishReason",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "ServerConfig",
    "StructuredOutputsParams",
    "__version__",
    "errors",
]

_HOMES = {
    "LLM": "pagemill.engine.offline",
    "AsyncLLM": "pagemill.engine.frontend",
    "EngineConfig": "pagemill.config",
    "ServerConfig": "pagemill.config",
    "BeamSearchParams": "pagemill.params",
    "CompletionOutput": "pagemill.params",
    "EmbeddingRequestOutput": "pagemill.params",
    "FinishReason": "pagemill.params",
    "Logprob": "pagemill.params",
    "PoolingParams": "pagemill.params",
    "RequestOutput": "pagemill.params",
    "SamplingParams": "pagemill.params",
    "ScoringRequestOutput": "pagemill.params",
    "StructuredOutputsParams": "pagemill.params",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("pagemill.errors")
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'pagemill' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pagemill")
    except PackageNotFoundError:
        return "0+uninstalled"

"""What the server asks of an engine: :class:`pagemill.engine.frontend.AsyncLLM` has it, and so has the tests' fake.

Holds no code. Text never crosses this border on the way in: prompts are token ids by then.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from pagemill.engine.metrics import Metrics
from pagemill.engine.pooling import PoolingPrompt
from pagemill.model_config import PoolingConfig
from pagemill.models.chat_template import ChatTemplate
from pagemill.models.tokenizer import Tokenizer
from pagemill.params import RequestOutput, SamplingParams

__all__ = ["Engine", "Health", "Text"]


class Health(Protocol):
    """Whether the engine steps."""

    @property
    def alive(self) -> bool: ...

    @property
    def reason(self) -> str | None: ...


class Text(Protocol):
    """What the front knows of the model."""

    def default_values(self) -> dict[str, Any]:
        """Sampling parameters that the model's authors recommend."""


class Engine(Protocol):
    """Generates, and says how it is."""

    @property
    def text(self) -> Text: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    @property
    def pooling(self) -> PoolingConfig | None: ...

    @property
    def embedding_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def model_name(self) -> str: ...

    @property
    def metrics(self) -> Metrics: ...

    def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        output_kind: str = "delta",
        has_room: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    def check_room(self, num_new: int) -> None:
        """Whether prompts of so many tokens may join the queue; raises QueueFullError."""

    async def call(self, name: str, *args: Any) -> Any:
        """An admin operation of the engine, done between two steps."""

    async def pool(
        self, prompts: Sequence[PoolingPrompt], request_id: str, *, priority: int = 0, cache_salt: str | None = None
    ) -> list[RequestOutput]: ...

    def health(self) -> Health: ...

    async def shutdown(self, timeout_s: float = 0.0) -> None: ...

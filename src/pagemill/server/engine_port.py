"""What the server asks of an engine: :class:`pagemill.engine.frontend.AsyncLLM` has it, and so has the tests' fake.

Holds no code. Text never crosses this border on the way in: prompts are token ids by then.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from pagemill.params import RequestOutput, SamplingParams

__all__ = ["ChatTemplate", "Engine", "Health", "Tokenizer"]


class Tokenizer(Protocol):
    """The part of models.tokenizer.Tokenizer that the server uses."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, index: int, /) -> str | None: ...

    def token_bytes(self, index: int, /) -> bytes: ...


class ChatTemplate(Protocol):
    """The part of models.chat_template.ChatTemplate that the server uses."""

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str: ...


class Health(Protocol):
    """Whether the engine steps."""

    @property
    def alive(self) -> bool: ...

    @property
    def reason(self) -> str | None: ...


class Engine(Protocol):
    """Generates, and says how it is."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def model_name(self) -> str: ...

    @property
    def metrics(self) -> Any: ...

    def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        output_kind: str = "delta",
    ) -> AsyncGenerator[RequestOutput, None]: ...

    def health(self) -> Health: ...

    async def shutdown(self, timeout_s: float = 0.0) -> None: ...

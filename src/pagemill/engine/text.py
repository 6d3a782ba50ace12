"""The front's share of a model: its name, tokenizer, chat template and default parameters.

Owns how the front opens a model. Must not import torch or touch weights: the engine process loads those meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagemill.config import EngineConfig
from pagemill.errors import RequestError
from pagemill.models.chat_template import ChatTemplate
from pagemill.models.checkpoint import open_checkpoint
from pagemill.models.sources import ModelSource
from pagemill.models.tokenizer import Tokenizer, load_tokenizer
from pagemill.params import SamplingParams

__all__ = ["ModelText"]

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class ModelText:
    """What turns messages into tokens and tokens into text, for one model."""

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None: the model has none."""
    generation_config: dict[str, Any]
    """The model's own generation_config.json; empty where it has none."""

    @classmethod
    def open(cls, source: ModelSource, config: EngineConfig) -> ModelText:
        """Read the small files (or the GGUF metadata) of a model."""
        checkpoint = open_checkpoint(source)
        try:
            tokenizer = load_tokenizer(checkpoint, config.tokenizer)
            template = ChatTemplate(tokenizer.chat_template, tokenizer) if tokenizer.chat_template else None
            if template is not None:
                template.warn_if_broken()
            _ = tokenizer.bound  # takes a moment, which nobody waits for here
            return cls(
                name=source.name,
                tokenizer=tokenizer,
                chat_template=template,
                generation_config=dict(checkpoint.generation_config),
            )
        finally:
            checkpoint.close()

    def default_params(self, **values: Any) -> SamplingParams:
        """Sampling parameters as the model's authors recommend them, where ``values`` say nothing else."""
        return SamplingParams.create(**{**self.default_values(), **values})

    def default_values(self) -> dict[str, Any]:
        """The parameters that the model's authors recommend."""
        if self.generation_config.get("do_sample") is False:
            return {"temperature": 0.0}
        found = {name: self.generation_config.get(name) for name in _DEFAULTS}
        return {name: value for name, value in found.items() if value is not None}

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The prompt for a conversation; tokenise it without adding special tokens."""
        if self.chat_template is None:
            raise RequestError(
                f"model {self.name} has no chat template; send a plain prompt, or give one with --chat-template",
                param="messages",
            )
        rendered: str = self.chat_template.render(messages, **options)
        return rendered

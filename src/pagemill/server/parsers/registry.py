"""Formats by name (vLLM's where it has one), and the choice by what a chat template says."""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from pagemill.config import ServerConfig
from pagemill.models.chat_template import ChatTemplate
from pagemill.server.parsers.answer import AnswerParser
from pagemill.server.parsers.calls import CallParser
from pagemill.server.parsers.deltas import Parser
from pagemill.server.parsers.forced import NamedCall, RequiredCalls
from pagemill.server.parsers.formats import ToolFormat
from pagemill.server.parsers.generic import JSON
from pagemill.server.parsers.granite import GRANITE
from pagemill.server.parsers.hermes import HERMES
from pagemill.server.parsers.llama import LLAMA3
from pagemill.server.parsers.mistral import MISTRAL
from pagemill.server.parsers.phi import PHI4_MINI
from pagemill.server.parsers.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningParser
from pagemill.server.tools import ToolUse

__all__ = ["TOOL_FORMATS", "Formats"]

TOOL_FORMATS = {
    "mistral": MISTRAL,
    "llama3_json": LLAMA3,
    "phi4_mini_json": PHI4_MINI,
    "granite": GRANITE,
    "hermes": HERMES,
    "json": JSON,
}
"""In the order in which a template is asked."""


@dataclass(frozen=True)
class Formats:
    """How a model writes calls, and how it marks its reasoning, if it does."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None

    @classmethod
    def chosen(cls, config: ServerConfig, template: ChatTemplate | None) -> Formats:
        """By flag, else by the template."""
        source = "" if template is None else template.source
        return cls(_tools(config.tool_call_parser, source), _reasoning(config.reasoning_parser, source))

    def needs_special(self, use: ToolUse, *, bound: bool = False) -> bool:
        """Whether special tokens must reach the text to be read."""
        thinking = self.reasoning is not None and self.reasoning.special and not bound
        return thinking or (use.mode == "auto" and self.tools.special)

    def thought(self, prompt: str, special_tokens: Set[str]) -> tuple[str, str] | None:
        """The marks of a thought that may precede the answer to ``prompt``, for a grammar; None: there is none.

        A mark that is a special token is no text, and cannot stand in a grammar.
        """
        form = self.reasoning
        if form is None or form.special or not special_tokens.isdisjoint((form.open, form.close)):
            return None
        end = prompt.rstrip()
        if end.endswith(form.close):
            return None
        return ("" if form.opens_itself or end.endswith(form.open) else form.open), form.close

    def tags(self, use: ToolUse, special_tokens: Set[str]) -> dict[str, Any] | None:
        """A structural tag that keeps calls of strict functions to their schemas, where the format allows it."""
        tag, openers = self.tools.tag, self.tools.openers
        if use.mode != "auto" or not use.strict or tag is None or openers[0] in special_tokens:
            return None
        begin, middle, end = tag
        structures = [
            {"begin": f"{begin}{json.dumps(name)}{middle}", "schema": use.arguments(name), "end": end}
            for name in use.names
        ]
        return {"triggers": [openers[0]], "structures": structures}

    def parser(self, prompt: str, use: ToolUse, *, bound: bool = False) -> AnswerParser | None:
        """For one choice; None where the text is the content as it is. ``prompt`` may have opened the reasoning.

        ``bound``: the output is JSON from its first character on, so it has no reasoning.
        """
        reasoning = None if self.reasoning is None or bound else ReasoningParser(self.reasoning, prompt)
        calls: Parser | None = None
        if use.mode == "named":
            calls = NamedCall(use.names[0], self.tools.new_id)
        elif use.mode == "required":
            calls = RequiredCalls(self.tools.new_id)
        elif use.mode == "auto":
            calls = CallParser(self.tools, set(use.names))
        if calls is None and reasoning is None:
            return None
        return AnswerParser(reasoning, calls, parallel=use.parallel)


def _tools(name: str, source: str) -> ToolFormat:
    if name != "auto":
        return TOOL_FORMATS[name]
    return next((form for form in TOOL_FORMATS.values() if any(hint in source for hint in form.hints)), JSON)


def _reasoning(name: str, source: str) -> ReasoningFormat | None:
    if name == "none":
        return None
    if name != "auto":
        return REASONING_FORMATS[name]
    return next((form for form in REASONING_FORMATS.values() if form.open in source and form.close in source), None)

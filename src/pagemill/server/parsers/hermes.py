"""Hermes, Qwen 2.5 and 3, SmolLM3: ``<tool_call>{...}</tool_call>``, one call in each."""

from __future__ import annotations

from pagemill.server.parsers.formats import ToolFormat

__all__ = ["HERMES"]

HERMES = ToolFormat(
    openers=("<tool_call>",),
    closer="</tool_call>",
    tag=('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>"),
    hints=("<tool_call>",),
)

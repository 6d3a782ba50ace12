"""Granite 3: a list of calls after ``<|tool_call|>`` (3.0) or ``<tool_call>`` (3.1 and later)."""

from __future__ import annotations

from pagemill.server.parsers.formats import ToolFormat

__all__ = ["GRANITE"]

GRANITE = ToolFormat(openers=("<|tool_call|>", "<tool_call>"), special=True, hints=("<|tool_call|>",))

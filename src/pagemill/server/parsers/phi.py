"""Phi-4-mini: ``functools[{...}, ...]``, or a list between ``<|tool_call|>`` and ``<|/tool_call|>``."""

from __future__ import annotations

from pagemill.server.parsers.formats import ToolFormat

__all__ = ["PHI4_MINI"]

PHI4_MINI = ToolFormat(
    openers=("functools", "<|tool_call|>"),
    closer="<|/tool_call|>",
    special=True,
    hints=("functools", "<|/tool_call|>", "<|/tool|>"),
)

"""Llama 3.1 and later: a bare ``{"name": ..., "parameters": ...}``, or the same after ``<|python_tag|>``; several are
separated by semicolons."""

from __future__ import annotations

from pagemill.server.parsers.formats import ToolFormat

__all__ = ["LLAMA3"]

LLAMA3 = ToolFormat(
    openers=("<|python_tag|>",),
    bare=True,
    separator=";",
    special=True,
    hints=("<|python_tag|>", "<|eom_id|>", "Environment: ipython"),
)

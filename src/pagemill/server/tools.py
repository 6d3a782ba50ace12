"""Whether a request's tools and tool_choice make sense. Must not parse answers."""

from __future__ import annotations

import re
from typing import Any

from pagemill.errors import RequestError

__all__ = ["check_tools"]

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def check_tools(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> None:
    """Raises RequestError naming the field."""
    for index, tool in enumerate(tools or ()):
        _check_tool(tool, f"tools[{index}]")
    if choice not in (None, "auto", "none"):
        raise RequestError("tool_choice must be auto or none in this version", param="tool_choice")


def _check_tool(tool: dict[str, Any], where: str) -> None:
    kind = tool.get("type")
    if kind != "function":
        raise RequestError(f"{where}.type is {str(kind)[:40]!r}; only function is known", param=f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function must be an object with a name", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name is {str(name)[:80]!r}; it must be 1 to 128 letters, digits, '_', '-', '.' or ':'",
            param=f"{where}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(
            f"{where}.function.parameters must be a JSON schema, an object", param=f"{where}.function.parameters"
        )

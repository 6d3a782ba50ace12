"""What a request's tools and tool_choice come to: which may be called, whether one must be, and the schema for that.

Owns the checks of both fields and the JSON schema of a forced answer. Must not parse answers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from pagemill.errors import RequestError

__all__ = ["NO_TOOLS", "ToolUse", "read_tools"]

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""The arguments of a function that declares none."""
MAX_DEPTH = 64


@dataclass(frozen=True)
class ToolUse:
    """The tools that may be called. ``required``: at least one call; ``named``: the one call of the one tool."""

    tools: tuple[dict[str, Any], ...] = ()
    mode: Literal["none", "auto", "required", "named"] = "none"
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """Whether the answer is calls and nothing else."""
        return self.mode in ("required", "named")

    @property
    def names(self) -> list[str]:
        """Of the tools that may be called."""
        return [tool["function"]["name"] for tool in self.tools]

    @property
    def strict(self) -> bool:
        """Whether a schema must be enforced or refused as a whole; otherwise as far as it can be."""
        return any(tool["function"].get("strict") is True for tool in self.tools)

    def arguments(self, name: str) -> dict[str, Any]:
        """The schema of a function's arguments where the model is free not to call it: any, unless it is strict."""
        (tool,) = (tool for tool in self.tools if tool["function"]["name"] == name)
        return _parameters(tool, "#") if tool["function"].get("strict") is True else {"type": "object"}

    def schema(self) -> dict[str, Any] | None:
        """Of a forced answer: a list of calls, or a named tool's arguments alone. None where nothing is forced."""
        if not self.forced:
            return None
        if self.mode == "named":
            return _parameters(self.tools[0], "#")
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{index}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for index, name in enumerate(self.names)
        ]
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not self.parallel:
            schema["maxItems"] = 1
        schema["$defs"] = {str(index): _parameters(tool, f"#/$defs/{index}") for index, tool in enumerate(self.tools)}
        return schema


NO_TOOLS = ToolUse()


def read_tools(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, *, parallel: bool) -> ToolUse:
    """Check both fields, as /v1/chat/completions writes them; RequestError names the one that is wrong."""
    for index, tool in enumerate(tools or ()):
        _check_tool(tool, f"tools[{index}]")
    known = {tool["function"]["name"]: tool for tool in tools or ()}
    if len(known) < len(tools or ()):
        raise RequestError("tools has two functions of one name; each needs its own", param="tools")
    if choice == "none" or (choice in (None, "auto") and not known):
        return NO_TOOLS
    if choice in (None, "auto"):
        return ToolUse(tuple(known.values()), "auto", parallel)
    if choice == "required":
        return ToolUse(_some(known, list(known)), "required", parallel)
    if isinstance(choice, dict) and choice.get("type") == "function":
        return ToolUse(_some(known, [_name_in(choice)]), "named", parallel)
    allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list):
        mode: Literal["required", "auto"] = "required" if allowed.get("mode") == "required" else "auto"
        return ToolUse(_some(known, [_name_in(each) for each in allowed["tools"]]), mode, parallel)
    raise RequestError(
        f"tool_choice is {str(choice)[:80]!r}; it must be auto, none, required, allowed_tools or one function:"
        ' {"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


def _name_in(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError('tool_choice needs {"function": {"name": ...}}', param="tool_choice")
    return name


def _some(known: dict[str, dict[str, Any]], names: list[str]) -> tuple[dict[str, Any], ...]:
    if not names:
        raise RequestError("tool_choice asks for a call and there are no tools; send tools", param="tool_choice")
    for name in names:
        if name not in known:
            raise RequestError(
                f"tool_choice names {name[:80]!r}, which is not among the tools: {', '.join(known)[:200] or 'none'}",
                param="tool_choice",
            )
    return tuple(known[name] for name in dict.fromkeys(names))


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
    if parameters and parameters.get("type", "object") != "object":
        raise RequestError(
            f"{where}.function.parameters.type is {str(parameters['type'])[:40]!r}; arguments are an object",
            param=f"{where}.function.parameters",
        )


def _parameters(tool: dict[str, Any], root: str) -> dict[str, Any]:
    """The schema of a tool's arguments, to stand at ``root``: its references to itself follow."""
    schema = tool["function"].get("parameters")
    if not schema:
        return NOTHING
    moved = {name: value for name, value in schema.items() if name not in ("$schema", "$id")}
    at_root: dict[str, Any] = _moved(moved, root, 0)
    return {"type": "object"} | at_root


def _moved(schema: Any, root: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise RequestError(
            f"a tool's parameters are nested more than {MAX_DEPTH} deep; make them flatter", param="tools"
        )
    if isinstance(schema, list):
        return [_moved(each, root, depth + 1) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: root + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else value
        if name in ("const", "enum", "default", "examples")
        else _moved(value, root, depth + 1)
        for name, value in schema.items()
    }

"""Items, as the Responses API writes a conversation, and the messages that a chat template takes.

Owns which kinds of items are understood and their full form (with ids), as they are stored and listed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from pagemill.errors import RequestError

__all__ = ["Item", "check_size", "new_id", "read_input", "to_messages"]

MAX_TEXT = 4 << 20
"""Characters of a conversation, about what a request's body may hold."""

Item = dict[str, Any]
ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "reasoning_text": "text"}
"""Kinds of content parts, and where their text is."""


def new_id(prefix: str) -> str:
    """A fresh id, as OpenAI's look."""
    return f"{prefix}_{secrets.token_hex(24)}"


def read_input(given: str | list[dict[str, Any]] | None, find: Callable[[str], Item | None]) -> list[Item]:
    """The request's own items in full form; ``find`` looks a referenced one up. RequestError names the place."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = []
    for index, item in enumerate(given or ()):
        where = f"input[{index}]"
        if item.get("type") == "item_reference" or (item.keys() == {"id"}):
            found = find(str(item.get("id")))
            if found is None:
                raise RequestError(f"{where}.id is {str(item.get('id'))[:80]!r}, which is not stored", param=where)
            items.append(found)
        else:
            items.append(_full(item, where))
    return items


def _full(item: Item, where: str) -> Item:
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        return _message(item, where)
    if kind == "function_call":
        for name in ("call_id", "name", "arguments"):
            _text(item, name, where)
        wanted = {name: item[name] for name in ("call_id", "name", "arguments")}
        return {"type": kind, "id": _id(item, "fc"), "status": "completed", **wanted}
    if kind == "function_call_output":
        _text(item, "call_id", where)
        output = item.get("output")
        if not isinstance(output, str):
            output = _parts(output, f"{where}.output", "input_text")
        wanted = {"call_id": item["call_id"], "output": output}
        return {"type": kind, "id": _id(item, "fco"), "status": "completed", **wanted}
    if kind == "reasoning":
        content = _parts(item.get("content") or [], f"{where}.content", "reasoning_text")
        summary = item.get("summary") if isinstance(item.get("summary"), list) else []
        return {"type": kind, "id": _id(item, "rs"), "summary": summary, "content": content, "status": "completed"}
    raise RequestError(
        f"{where}.type is {str(kind)[:40]!r}; known: message, function_call, function_call_output, reasoning,"
        " item_reference",
        param=f"{where}.type",
    )


def _id(item: Item, prefix: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and given else new_id(prefix)


def _text(item: Item, name: str, where: str) -> None:
    if not isinstance(item.get(name), str):
        raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")


def _message(item: Item, where: str) -> Item:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{where}.role is {str(role)[:40]!r}; known: {', '.join(ROLES)}", param=f"{where}.role")
    content = item.get("content")
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    parts = _parts(content, f"{where}.content", kind)
    return {"type": "message", "id": _id(item, "msg"), "status": "completed", "role": role, "content": parts}


def _parts(content: Any, where: str, kind: str) -> list[Item]:
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts", param=where)
    parts = []
    for index, part in enumerate(content):
        given = part.get("type") if isinstance(part, dict) else None
        text = part.get(TEXTS[given]) if isinstance(given, str) and given in TEXTS else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where}[{index}].type is {str(given)[:40]!r}; only text is understood: {', '.join(TEXTS)}",
                param=f"{where}[{index}].type",
            )
        full: Item = {"type": kind, "text": text}
        if kind == "output_text":
            full |= {"annotations": [], "logprobs": []}
        parts.append(full)
    return parts


def to_messages(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Chat messages: calls and reasoning go to the assistant's turn, leading system messages become one."""
    leading = [instructions] if instructions else []  # joined at the end, as texts of thousands of items may be long
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            text = item["output"] if isinstance(item["output"], str) else _joined(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        elif kind == "message":
            role, text = ROLES[item["role"]], _joined(item["content"])
            if role == "system" and not messages:
                leading.append(text)
            else:
                _add_message(messages, role, text)
        else:
            turn = _turn(messages)
            if kind == "reasoning":
                turn.setdefault("reasoning_content", []).append(_joined(item["content"]))
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return [{"role": "system", "content": "\n\n".join(leading)}, *messages] if leading else messages


def check_size(items: Sequence[Item]) -> None:
    """Refuse a conversation whose items, each counted as often as it is referred to, hold more than MAX_TEXT."""
    size = 0
    for item in items:
        held = item.get("content") or item.get("output") or item.get("arguments") or ""
        size += len(held) if isinstance(held, str) else sum(len(part["text"]) for part in held)
    if size > MAX_TEXT:
        raise RequestError(
            f"the conversation holds {size:,} characters; the most is {MAX_TEXT:,}; send or refer to fewer items",
            param="input",
        )


def _add_message(messages: list[dict[str, Any]], role: str, text: str) -> None:
    if role == "assistant":
        turn = _turn(messages)
        if turn["content"] is None and "tool_calls" not in turn:
            turn["content"] = text
            return
    messages.append({"role": role, "content": text})


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that goes on, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _joined(parts: Sequence[Item]) -> str:
    return "".join(part["text"] for part in parts)

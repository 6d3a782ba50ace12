"""Conversations to prompts, by the Jinja template that comes with a model.

Owns the shape in which messages reach a template, and turns whatever goes wrong in it into a RequestError with the
template's own words. Must not tokenise. A rendered prompt holds its special tokens as text: tokenise it with
``add_special_tokens=False``, or it gets a second BOS.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes

from pagemill.errors import ConfigError, RequestError
from pagemill.models.template_sandbox import TemplateSandbox, budget
from pagemill.models.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "template_source"]

logger = logging.getLogger(__name__)

TEXT_PARTS = ("text", "input_text", "output_text")
MARK = "\ue000here the last message goes on\ue001\u2003"
"""Stands for the end of the last message while it is rendered. Its last character is a space that a template may strip
and that none writes itself."""

_FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""What Jinja and its filters raise for values that they do not fit."""


class _CompileError(Exception):
    """Where, and why."""


def _compiled(source: str) -> tuple[Template, nodes.Template]:
    environment = TemplateSandbox()
    try:
        with budget():
            return environment.from_string(source), environment.parse(source)
    except TemplateSyntaxError as error:
        raise _CompileError(f"line {error.lineno}: {error.message}") from None
    except (TemplateError, SyntaxError, *_FAILURES) as error:
        raise _CompileError(_one_line(error)) from None


def template_source(given: str) -> str:
    """The source of --chat-template, which is a file or the template itself.

    Raises ConfigError if it cannot be read or does not compile: a model's own template may be broken, one that was
    chosen may not.
    """
    source = given
    if "{" not in given:
        try:
            source = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--chat-template={given!r} cannot be read ({error}); name a Jinja file, or give the template itself"
            ) from None
    try:
        _compiled(source)
    except _CompileError as error:
        raise ConfigError(f"--chat-template does not compile: {error}; mend it, or leave it out") from None
    return source


class ChatTemplate:
    """A compiled template. One that does not compile refuses each conversation."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.source = source
        self._tokens = tokenizer.special_tokens
        self._knows_calls = "tool_calls" in source
        self._loops_over_parts = self._knows_text = self._writes_arguments = False
        self._problem: str | None = None
        try:
            self._template, tree = _compiled(source)
        except _CompileError as error:
            self._problem = str(error)
        else:
            self._loops_over_parts, self._knows_text = _content_kinds(tree)
            self._writes_arguments = _writes_arguments(tree)

    def warn_if_broken(self) -> None:
        """Tell the log, where this is the server's own template and no single request's."""
        if self._problem is not None:
            logger.warning("the chat template does not compile, so chats are refused: %s", self._problem)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for ``messages``. Raises RequestError.

        ``add_generation_prompt`` opens the assistant's turn; ``continue_final_message`` leaves the last message open
        instead. ``variables`` reach the template beside these.
        """
        if self._problem is not None:
            raise RequestError(f"the chat template does not compile: {self._problem}", param="chat_template")
        shaped = [self._shaped(message, f"messages[{index}]") for index, message in enumerate(messages)]
        if not shaped:
            raise RequestError("messages is empty, and the prompt cannot be empty; send one", param="messages")
        if continue_final_message:
            shaped[-1] = _marked(shaped[-1])
        context = {
            **self._tokens,
            **variables,
            "messages": shaped,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = self._render(context)
        if continue_final_message:
            text = _cut_at_mark(text)
        if not text:
            raise RequestError("the chat template renders these messages to nothing; the prompt cannot be empty")
        return text

    def _render(self, context: dict[str, Any]) -> str:
        try:
            with budget():
                return self._template.render(context)
        except TemplateError as error:
            raise RequestError(f"the chat template refuses this: {_one_line(error)}", param="messages") from error
        except _FAILURES as error:
            raise RequestError(
                f"the chat template does not fit these messages ({type(error).__name__}: {_one_line(error)})",
                param="messages",
            ) from error

    def _shaped(self, message: Mapping[str, Any], where: str) -> dict[str, Any]:
        """A copy as templates expect it: content as text or parts, arguments of tool calls as objects.

        A template that knows nothing of tool calls gets them as absent content's text, or the model would not know what
        it called.
        """
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where} has no role", param=where)
        shaped = dict(message)
        calls = shaped.get("tool_calls")
        if isinstance(calls, list):
            shape = _with_text_arguments if self._writes_arguments else _with_object_arguments
            shaped["tool_calls"] = [shape(call) for call in calls]
        content = shaped.get("content")
        if content is None and isinstance(calls, list) and not self._knows_calls:
            content = _calls_as_text(shaped["tool_calls"])
            shaped["content"] = content
        if content is None:
            shaped["content"] = None if calls else ""
        elif isinstance(content, str):
            if self._loops_over_parts and not self._knows_text:
                shaped["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list):
            texts = [_text_of(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
            parts = [{"type": "text", "text": text} for text in texts]
            shaped["content"] = parts if self._loops_over_parts else "\n".join(texts)
        else:
            raise RequestError(f"{where}.content is a {type(content).__name__}; it must be text or parts", param=where)
        return shaped


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in TEXT_PARTS:
        text = part.get("text")
        if isinstance(text, str):
            return text
        given = f"is a {type(text).__name__}" if "text" in part else "is missing"
        raise RequestError(f"{where}.text {given}; a part of type {kind!r} needs it as a string", param=where)
    raise RequestError(f"{where} is of type {kind!r}; only text parts are understood", param=where)


def _with_object_arguments(call: Any) -> Any:
    """OpenAI sends arguments as a JSON string; templates write them with tojson."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _calls_as_text(calls: list[Any]) -> str:
    """As a model writes them that has no format of its own."""
    functions = [call.get("function") if isinstance(call, Mapping) else call for call in calls]
    return "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)


def _with_text_arguments(call: Any) -> Any:
    """For templates that write the arguments as they are: JSON, not Python's way of showing an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _writes_arguments(tree: nodes.Template) -> bool:
    """Whether a template puts a call's arguments into the text without tojson, items or a test of their type."""
    parents = {id(child): node for node in _walk(tree) for child in node.iter_child_nodes()}
    places = [parents.get(id(node)) for node in _walk(tree) if _is_arguments(node)]
    return bool(places) and all(isinstance(place, nodes.Add | nodes.Concat | nodes.Output) for place in places)


def _walk(tree: nodes.Template) -> list[nodes.Node]:
    return [tree, *tree.find_all(nodes.Node)]


def _is_arguments(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "arguments"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "arguments"


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list) and content:
        last = content[-1]
        return {**message, "content": [*content[:-1], {**last, "text": last["text"] + MARK}]}
    return {**message, "content": (content or "") + MARK}


def _cut_at_mark(text: str) -> str:
    """Everything before the end of the last message. Where the template stripped the message, so is it here."""
    at = text.rfind(MARK.rstrip())
    if at < 0:
        raise RequestError(
            "the chat template leaves the last message out, so it cannot be continued", param="continue_final_message"
        )
    kept = text[:at]
    return kept if text.startswith(MARK, at) else kept.rstrip()


def _content_kinds(tree: nodes.Template) -> tuple[bool, bool]:
    """Whether a template loops over the parts of a message's content, and whether it asks if content is a string."""
    assigned = {
        target.name
        for assignment in tree.find_all(nodes.Assign)
        for target in [assignment.target]
        if isinstance(target, nodes.Name) and _is_content(assignment.node, set())
    }
    loops = any(_is_content(loop.iter, assigned) for loop in tree.find_all(nodes.For))
    return loops, any(test.name == "string" for test in tree.find_all(nodes.Test))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """``message.content``, ``message['content']``, or a name that was assigned from it, filtered or not."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__

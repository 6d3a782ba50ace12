"""A Jinja environment for chat templates that nobody vouches for: they come with models, and with requests.

Owns what a template may do, and how much of it. Must not know messages. Jinja's immutable sandbox keeps a template away
from Python; this one also bounds its work and its memory: every loop round and every call is counted, and nothing
larger than ``MAX_SIZE`` is ever built, because whatever multiplies (``*``, ``+``, ``~``, joining, replacing, padding,
literals that hold a value many times) is weighed first, and every other result is weighed before it can be used again.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["TemplateSandbox", "budget"]

MAX_SIZE = 8_000_000
"""Characters of any text, items of any value, that a template may build."""
MAX_STEPS = 1_000_000
"""Loop rounds, calls, weighed items, and 4096s of characters in one rendering."""
MAX_SECONDS = 5.0
MAX_INTEGER_BITS = 4096
MAX_WIDTH = 10_000
"""Padding and indentation."""

REMOVED_FILTERS = ("batch", "slice", "center", "wordwrap", "urlize", "pprint", "random", "xmlattr")
"""What chat templates do not need and what could multiply or block."""


class _Budget:
    """What is left for one rendering."""

    def __init__(self) -> None:
        self.steps = 0
        self.deadline_s = time.monotonic() + MAX_SECONDS

    def spend(self, steps: int = 1) -> None:
        before, self.steps = self.steps, self.steps + steps
        if self.steps > MAX_STEPS:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")
        if before >> 10 != self.steps >> 10 and time.monotonic() > self.deadline_s:
            raise SecurityError(f"it takes longer than {MAX_SECONDS:g} s")


_current: ContextVar[_Budget] = ContextVar("template_budget")


@contextmanager
def budget() -> Iterator[None]:
    """Within it, one template may be compiled or rendered; each thread and task has its own."""
    token = _current.set(_Budget())
    try:
        yield
    finally:
        _current.reset(token)


def _refuse(size: int) -> NoReturn:
    raise SecurityError(f"it builds something of size {size}; the most is {MAX_SIZE}")


def weighed(value: Any) -> Any:
    """The value itself, if all that it holds, counted as often as it is held, is within MAX_SIZE."""
    if isinstance(value, str):
        if len(value) > MAX_SIZE:
            _refuse(len(value))
        _current.get().spend(len(value) >> 12)
        return value
    if isinstance(value, list | tuple | dict):
        size, seen, stack = 0, 0, [value]
        while stack:
            item = stack.pop()
            seen += 1
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, Mapping):
                stack += item.keys()
                stack += item.values()
            elif isinstance(item, list | tuple):
                stack += item
            if size + seen + len(stack) > MAX_SIZE:
                _refuse(size + seen + len(stack))
            if seen & 0x3FF == 0:
                _current.get().spend(0x400)
    return value


def joined(parts: Iterable[Any]) -> str:
    """Texts one after the other; weighed before they are put together."""
    texts = [part if isinstance(part, str) else str(weighed(part)) for part in parts]
    size = sum(map(len, texts))
    if size > MAX_SIZE:
        _refuse(size)
    return "".join(texts)


class _CodeGenerator(CodeGenerator):
    """Puts the counting and the weighing into compiled templates."""

    _loops: tuple[nodes.Node, ...] = ()

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if any(node is loop for loop in self._loops):
            self._through("counted", super().visit, node, *args)
        else:
            super().visit(node, *args, **kwargs)

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible  # nothing of a template runs while it is compiled
        return super()._output_child_to_const(node, frame, finalize)

    def visit_For(self, node: nodes.For, frame: Any) -> None:  # noqa: N802 - named after the node
        outer, self._loops = self._loops, (*self._loops, node.iter)
        super().visit_For(node, frame)
        self._loops = outer

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Any) -> None:  # noqa: N802
        self._through("weighed", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:  # noqa: N802
        self._through("weighed", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:  # noqa: N802
        if node.ctx == "load":
            self._through("weighed", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _through(self, name: str, visit: Callable[..., Any], node: nodes.Node, *args: Any) -> None:
        self.write(f"environment.{name}(")
        visit(node, *args)
        self.write(")")


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that Jinja looks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<namespace>"


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """What transformers offers to chat templates, and bounds. Use inside :func:`budget`."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"*", "**", "+", "%"})
    concat = staticmethod(joined)
    joined = staticmethod(joined)
    weighed = staticmethod(weighed)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation], optimized=False
        )
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters = {name: _weighing(function) for name, function in self.filters.items()}
        self.filters |= {
            "tojson": tojson,
            "join": _weighing(_checked_before(self.filters["join"], _check_join)),
            "replace": _weighing(_checked_before(self.filters["replace"], _check_replace)),
            "indent": _weighing(_checked_before(self.filters["indent"], _check_indent)),
            "format": _weighing(_checked_before(self.filters["format"], _check_format)),
        }
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": _Namespace,
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }

    @staticmethod
    def counted(items: Any) -> Any:
        """The items of a loop, each of them counted when it is reached."""
        if isinstance(items, list | tuple | dict | str | range):
            _current.get().spend(len(items))
            return items
        return (_spent(item) for item in items)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Weigh what an operator would build."""
        size = 0
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
                    size = len(one) * other
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            size = len(left) + len(right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, *(right if isinstance(right, tuple) else (right,)))
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INTEGER_BITS:
                raise SecurityError(f"it computes a number of {bits} bits; the most is {MAX_INTEGER_BITS}")
        if size > MAX_SIZE:
            _refuse(size)
        return weighed(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in Jinja
        """Count a call, and weigh what it is given and what it returns."""
        _current.get().spend()
        if not isinstance(__obj, Macro):
            method = getattr(__obj, "__wrapped__", __obj)  # str.format comes wrapped
            check = _METHOD_CHECKS.get(getattr(method, "__name__", ""))
            if check is not None and isinstance(getattr(method, "__self__", None), str):
                check(method.__self__, *args, **kwargs)
        return weighed(super().call(__context, __obj, *args, **kwargs))


def _spent(item: Any) -> Any:
    _current.get().spend()
    return item


def _weighing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # with the attributes by which Jinja knows what to pass first
    def weighing(*args: Any, **kwargs: Any) -> Any:
        return weighed(function(*args, **kwargs))

    return weighing


def _checked_before(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Filters that get the environment or context first have that left out for the check."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*(args[1:] if hasattr(function, "jinja_pass_arg") else args), **kwargs)
        return function(*args, **kwargs)

    return checked


def _check_join(items: Any, separator: Any = "", *_: Any, d: Any = "", **__: Any) -> None:
    if isinstance(items, str):  # the method: "-".join(items)
        items, separator = separator, items
    if hasattr(items, "__len__"):
        weighed(items)
        size = len(items) * len(str(d or separator))
        if size > MAX_SIZE:
            _refuse(size)


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    text, old, new = str(weighed(text)), str(old), str(new)
    size = (text.count(old) if old else len(text) + 1) * len(new) + len(text)
    if size > MAX_SIZE:
        _refuse(size)


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    unit = len(width) if isinstance(width, str) else int(width)
    size = (str(weighed(text)).count("\n") + 1) * unit
    if unit > MAX_WIDTH or size > MAX_SIZE:
        _refuse(max(size, unit))


def _check_width(_text: str, width: Any = 8, *_: Any, **kwargs: Any) -> None:
    for value in (width, *kwargs.values()):
        if isinstance(value, int) and value > MAX_WIDTH:
            _refuse(value)


def _check_tabs(text: str, width: Any = 8, **kwargs: Any) -> None:
    _check_width(text, width, **kwargs)
    size = text.count("\t") * max(int(width), *map(int, kwargs.values()), 0)
    if size > MAX_SIZE:
        _refuse(size)


_NUMBER = re.compile(r"\d+")
_NESTED_SPEC = re.compile(r"\{[^{}]*\{")


def _check_format(text: Any, *args: Any, **kwargs: Any) -> None:
    """Widths come from the format itself, from nested fields ``{:{}}``, or from ``*``."""
    text = str(text)
    widths = [int(number[:9]) for number in _NUMBER.findall(text)]
    if any(width > MAX_WIDTH for width in widths) or _NESTED_SPEC.search(text) or re.search(r"%[^a-zA-Z%]*\*", text):
        raise SecurityError(f"the format {text[:50]!r} sets widths of more than {MAX_WIDTH}, or computes them")
    weights = [len(str(weighed(value))) for value in (*args, *kwargs.values())]
    size = len(text) + (text.count("{") + text.count("%")) * (max(weights, default=0) + max(widths, default=0))
    if size > MAX_SIZE:
        _refuse(size)


_METHOD_CHECKS: dict[str, Callable[..., None]] = {
    "join": _check_join,
    "replace": _check_replace,
    "format": _check_format,
    "format_map": _check_format,
    "center": _check_width,
    "ljust": _check_width,
    "rjust": _check_width,
    "zfill": _check_width,
    "expandtabs": _check_tabs,
}


def raise_exception(message: str) -> NoReturn:
    """What templates call when they cannot render a conversation."""
    raise TemplateError(str(message))


def strftime_now(form: str) -> str:
    """The local time, as templates that tell the model the date want it."""
    return datetime.now().strftime(form)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: text as it is, no HTML escapes."""
    if indent is not None and indent > MAX_WIDTH // 100:
        _refuse(indent)
    text = json.dumps(
        weighed(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return str(weighed(text))

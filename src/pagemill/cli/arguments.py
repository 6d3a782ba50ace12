"""From a config class to command-line flags and back.

Owns the argparse conventions that all verbs share. Flags, defaults and help come from the config's own fields and
docstrings, so that nothing is declared twice. Must not import anything heavy.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NoReturn, TypeVar

from pagemill.config import EngineConfig, Flag, ServerConfig, flags, human_int, validate
from pagemill.errors import did_you_mean

__all__ = ["Parser", "UsageError", "add_config_flags", "config_from", "positive", "whole_number"]

ConfigT = TypeVar("ConfigT", EngineConfig, ServerConfig)


class UsageError(Exception):
    """The command line cannot be understood; the message is the one line to print."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises :class:`UsageError` with one line in place of printing its whole usage."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", _HelpFormatter)
        super().__init__(**options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but what is not known is refused here, where the options that may be meant are known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            close = did_you_mean(word, self._option_string_actions) if word.startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{close}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} ({self.prog} --help lists the options)")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=36, width=110, **options)


def whole_number(text: str) -> int:
    """:func:`~pagemill.config.human_int`, its error in argparse's form."""
    try:
        return human_int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """A count: 1 or more."""
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too small; the least is 1")
    return number


def _values(text: str) -> list[str]:
    """One value, or a JSON list of them, as vLLM has it."""
    if text.startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise argparse.ArgumentTypeError(f"{text!r} is no JSON list of strings")
        return found
    return [text]


def add_config_flags(parser: argparse.ArgumentParser, cls: type[EngineConfig] | type[ServerConfig]) -> None:
    """One flag per field, in a group of its own; the model may also stand as the verb's first word."""
    title = "engine" if cls is EngineConfig else "server"
    group = parser.add_argument_group(title)
    for flag in flags(cls):
        if flag.name == "model":
            parser.add_argument("model_word", nargs="?", metavar="MODEL", help=flag.help)
        _add_flag(group, flag)


def _add_flag(group: argparse._ArgumentGroup, flag: Flag) -> None:
    name = flag.option
    help_text = _help(flag)
    options: dict[str, Any]
    if flag.type is bool:
        group.add_argument(
            name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, dest=flag.name, help=help_text
        )
        if name == "--enable-log-requests":
            text = "vLLM's older name for --no-enable-log-requests."
            options = {"action": "store_false", "default": argparse.SUPPRESS, "dest": flag.name, "help": text}
            group.add_argument("--disable-log-requests", **options)
        return
    options = {"dest": flag.name, "default": argparse.SUPPRESS, "help": help_text}
    options["type"] = whole_number if flag.type is int else flag.type
    options["metavar"] = "{" + ",".join(flag.choices) + "}" if flag.choices else flag.type.__name__.upper()
    if flag.repeated:
        # One value a flag: with more, the model behind them would be one of them, and the default model served.
        kind = _key if flag.secret else _values
        options |= {"action": "extend", "type": kind, "metavar": flag.name.upper()}
    group.add_argument(name, **options)


def _key(text: str) -> list[str]:
    return [text]


def _help(flag: Flag) -> str:
    text = flag.help
    if flag.default not in (None, ()) and "default" not in text.lower():
        text += f" Default: {flag.default}."
    return text.replace("%", "%%")


def config_from(args: argparse.Namespace, cls: type[ConfigT]) -> ConfigT:
    """Build the config from parsed arguments and check its bounds."""
    given = vars(args)
    values = {flag.name: given[flag.name] for flag in flags(cls) if flag.name in given}
    values |= {flag.name: tuple(values[flag.name]) for flag in flags(cls) if flag.repeated and flag.name in values}
    word = given.get("model_word")
    if cls is EngineConfig and word is not None:
        if values.get("model", word) != word:
            raise UsageError(f"MODEL={word!r} and --model={values['model']!r} name two models; leave one out")
        values["model"] = word
    config = cls(**values)
    validate(config)
    return config

"""From a config class to command-line flags and back.

Owns the argparse conventions that all verbs share. Flags, defaults and help come from the config's own fields and
docstrings, so that nothing is declared twice. Must not import anything heavy.
"""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn, TypeVar

from pagemill.config import EngineConfig, Flag, ServerConfig, flags, validate

__all__ = ["Parser", "UsageError", "add_config_flags", "config_from", "human_int"]

ConfigT = TypeVar("ConfigT", EngineConfig, ServerConfig)


class UsageError(Exception):
    """The command line cannot be understood; the message is the one line to print."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises :class:`UsageError` with one line in place of printing its whole usage."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", _HelpFormatter)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} ({self.prog} --help lists the options)")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=36, width=110, **options)


_INT = re.compile(r"([-+]?\d[\d_]*(?:\.\d+)?)([kKmMgGtT]?)")
_FACTORS = {"": 1, **{unit: 1000 ** (i + 1) for i, unit in enumerate("kmgt")}}
_FACTORS |= {unit: 1024 ** (i + 1) for i, unit in enumerate("KMGT")}


def human_int(text: str) -> int:
    """``4096``, ``4k`` (4,000), ``4K`` (4,096), ``1.5G``: as vLLM reads them."""
    match = _INT.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (4096, 4k = 4000, 4K = 4096, 2G)")
    number, unit = match.groups()
    if not unit and "." in number:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(float(number) * _FACTORS[unit]) if "." in number else int(number) * _FACTORS[unit]


def add_config_flags(parser: argparse.ArgumentParser, cls: type[EngineConfig] | type[ServerConfig]) -> None:
    """One flag per field, in a group of its own; the model may also stand as the verb's first word."""
    title = "engine" if cls is EngineConfig else "server"
    group = parser.add_argument_group(title)
    for flag in flags(cls):
        if flag.name == "model":
            parser.add_argument("model_word", nargs="?", metavar="MODEL", help=flag.help)
        _add_flag(group, flag)


def _add_flag(group: argparse._ArgumentGroup, flag: Flag) -> None:
    name = "--" + flag.name.replace("_", "-")
    help_text = _help(flag)
    if flag.type is bool:
        group.add_argument(
            name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, dest=flag.name, help=help_text
        )
        return
    options: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS, "help": help_text}
    options["type"] = human_int if flag.type is int else flag.type
    options["metavar"] = "{" + ",".join(flag.choices) + "}" if flag.choices else flag.type.__name__.upper()
    if flag.repeated:
        options |= {"action": "extend", "nargs": "+", "type": str, "metavar": flag.name.upper()}
    group.add_argument(name, **options)


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
    if cls is EngineConfig and given.get("model_word") is not None:
        values["model"] = given["model_word"]
    config = cls(**values)
    validate(config)
    return config

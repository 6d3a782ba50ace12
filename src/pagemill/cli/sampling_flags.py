"""Sampling parameters on the command line, for the verbs that produce text themselves.

Names, help and bounds are those of :class:`~pagemill.params.SamplingParams`; what is not given keeps the model's own
default.
"""

from __future__ import annotations

import argparse
from typing import Any

from pagemill.cli.arguments import whole_number
from pagemill.config import docstrings
from pagemill.params import SamplingParams

__all__ = ["add_sampling_flags", "sampling_values"]

_FLAGS: dict[str, Any] = {
    "max_tokens": whole_number,
    "temperature": float,
    "top_p": float,
    "top_k": whole_number,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": whole_number,
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """The parameters that people set by hand."""
    group = parser.add_argument_group("sampling")
    about = docstrings(SamplingParams)
    for name, kind in _FLAGS.items():
        metavar = "INT" if kind is whole_number else "FLOAT"
        text = about[name].replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        # The engine has a --seed of its own: where requests without one draw theirs from.
        if name == "seed":
            flag, text = "--request-seed", text + " The same for every request."
        group.add_argument(flag, dest=f"sampling_{name}", type=kind, metavar=metavar, help=text)


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """What was given, by parameter."""
    given = {name: getattr(args, f"sampling_{name}") for name in _FLAGS}
    return {name: value for name, value in given.items() if value is not None}

"""The command line: ``pagemill VERB ...``; one file a verb.

Owns the table of verbs, how errors become one line on stderr, and exit codes: 0 done, 1 it failed, 2 the command, its
configuration or the model that it names is wrong, 130 interrupted. A verb's module has ``configure(parser)`` and
``run(args) -> int`` and is imported only when it is called, so that ``pagemill --help`` answers at once; what is heavy
(torch, HTTP) is imported inside ``run``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.cli.arguments import Parser, UsageError
from pagemill.errors import ConfigError, ModelError, PagemillError

__all__ = ["VERBS", "Verb", "main"]


@dataclass(frozen=True)
class Verb:
    """A word after ``pagemill`` and the module that does it."""

    name: str
    summary: str

    @property
    def module(self) -> str:
        """Where ``configure`` and ``run`` are."""
        return f"pagemill.cli.{self.name}"


VERBS: tuple[Verb, ...] = (
    Verb("serve", "serve a model over OpenAI's HTTP API, with a web page"),
    Verb("chat", "talk to a model in the terminal"),
    Verb("generate", "complete a file of prompts: JSONL in, JSONL out"),
    Verb("bench", "measure throughput, latency, or a running server"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except (ConfigError, ModelError) as error:
        print(f"pagemill: {error}", file=sys.stderr)
        return 2
    except PagemillError as error:
        print(f"pagemill: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        return 130


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in {"-h", "--help", "help"}:
        print(_overview())
        return 0
    if words[0] in {"-V", "--version"}:
        print(f"pagemill {_version()}")
        return 0
    verb = next((verb for verb in VERBS if verb.name == words[0]), None)
    if verb is None:
        names = ", ".join(verb.name for verb in VERBS)
        raise UsageError(f"pagemill: unknown verb {words[0]!r}; known: {names} (pagemill --help)")
    module = importlib.import_module(verb.module)
    parser = Parser(prog=f"pagemill {verb.name}", description=verb.summary)
    module.configure(parser)
    code: int = module.run(parser.parse_args(words[1:]))
    return code


def _overview() -> str:
    width = max(len(verb.name) for verb in VERBS)
    lines = ["Serves open-weight language models to many users at once from paged KV memory.", ""]
    lines += ["usage: pagemill VERB [MODEL] [options]", ""]
    lines += [f"  {verb.name:<{width}}  {verb.summary}" for verb in VERBS]
    lines += ["", "pagemill VERB --help lists a verb's options; pagemill --version prints the version."]
    return "\n".join(lines)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pagemill")
    except PackageNotFoundError:
        return "0 (not installed)"

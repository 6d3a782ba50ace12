"""``pagemill chat``: talk to a model in the terminal.

Owns the conversation and the keyboard: Ctrl-C stops the answer, not the program; Ctrl-D leaves. The engine runs in this
process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol

from pagemill.cli.arguments import add_config_flags, config_from
from pagemill.cli.sampling_flags import add_sampling_flags, sampling_values
from pagemill.config import EngineConfig, ServerConfig, docstrings
from pagemill.errors import ConfigError, PagemillError

if TYPE_CHECKING:
    from pagemill.engine.offline import LLM

__all__ = ["Conversation", "configure", "run"]

HELP = """\
/clear          forget the conversation
/system TEXT    set the system prompt (and forget the conversation); without TEXT: none
/retry          answer the last message again
/help           this text
/exit           leave; so does Ctrl-D
Ctrl-C stops an answer."""


class _Answers(Protocol):
    def __call__(self, messages: list[dict[str, Any]]) -> Generator[str, None, None]:
        """The answer's text, piece by piece."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Engine and sampling flags, and the system prompt."""
    parser.add_argument("--system", metavar="TEXT", help="System prompt.")
    template = docstrings(ServerConfig)["chat_template"]
    parser.add_argument("--chat-template", metavar="STR", help=template)
    add_sampling_flags(parser)
    add_config_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Talk until the end of input."""
    config = config_from(args, EngineConfig)
    print(f"loading {config.model} ...", end="", flush=True, file=sys.stderr)

    from pagemill.engine.offline import LLM
    from pagemill.models.chat_template import ChatTemplate, template_source

    given = None if args.chat_template is None else template_source(args.chat_template)
    with LLM.from_config(config) as llm:
        if llm.model_config.pooling is not None:
            raise ConfigError(f"{llm.text.name} makes vectors and no text; chat with a model that generates")
        if given is not None:
            template = ChatTemplate(given, llm.tokenizer)
            llm.text = dataclasses.replace(llm.text, chat_template=template)
        print(f"\r{llm.text.name}, {llm.max_model_len} tokens of context. /help lists commands.", file=sys.stderr)
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        talk = Conversation(_answers(llm, sampling_values(args)), args.system)
        while True:
            try:
                line = input("> ")
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves)")
                continue
            if not talk.take(line.strip()):
                return 0


def _answers(llm: LLM, given: dict[str, Any]) -> _Answers:
    params = llm.text.default_params(**{"max_tokens": None, **given})

    def answers(messages: list[dict[str, Any]]) -> Generator[str, None, None]:
        prompt = llm.text.render_chat(messages)
        with contextlib.closing(llm.stream(prompt, params, add_special_tokens=False)) as outputs:
            for output in outputs:
                yield output.outputs[0].text

    return answers


class Conversation:
    """The messages so far. ``answers`` produces the next one; ``show`` prints text without a line end."""

    def __init__(self, answers: _Answers, system: str | None = None, show: Callable[[str], None] | None = None) -> None:
        self._answers = answers
        self._show = show or _print
        self._system = system
        self.messages: list[dict[str, Any]] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def take(self, line: str) -> bool:
        """One line from the keyboard: a command or a message. False to leave."""
        if not line.startswith("/"):
            if line:
                self.messages.append({"role": "user", "content": line})
                self._answer()
            return True
        command, _, rest = line.partition(" ")
        if command in {"/exit", "/quit", "/bye"}:
            return False
        if command == "/clear":
            self.clear()
        elif command == "/system":
            self._system = rest.strip() or None
            self.clear()
        elif command == "/retry":
            self._retry()
        elif command == "/help":
            self._show(HELP + "\n")
        else:
            self._show(f"unknown command {command}; /help lists them\n")
        return True

    def _retry(self) -> None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if self.messages and self.messages[-1]["role"] == "user":
            self._answer()
        else:
            self._show("there is no message to answer\n")

    def _answer(self) -> None:
        """Show the answer as it comes. What was shown before Ctrl-C stays part of the conversation."""
        parts: list[str] = []
        try:
            with contextlib.closing(self._answers(self.messages)) as pieces:
                for piece in pieces:
                    parts.append(piece)
                    self._show(piece)
        except KeyboardInterrupt:
            self._show(" (stopped)")
        except PagemillError as error:
            self.messages.pop()
            self._show(f"{error}\n")
            return
        self._show("\n")
        self.messages.append({"role": "assistant", "content": "".join(parts)})


def _print(text: str) -> None:
    print(text, end="", flush=True)

"""``pagemill generate``: a file of prompts in, a file of answers out, as fast as the machine can.

Owns the two files. The output only ever grows by whole lines, in the order in which answers are ready, so the work can
be stopped at any time and goes on where it stopped: what the output already answers is not asked again. A line that
cannot be served becomes an error in the output, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from pagemill.cli.arguments import add_config_flags, config_from
from pagemill.cli.batch_lines import BatchLine, answer, failure, parse_line, sampling_params, template_options
from pagemill.cli.sampling_flags import add_sampling_flags, sampling_values
from pagemill.config import EngineConfig
from pagemill.errors import ConfigError, PagemillError, RequestError

if TYPE_CHECKING:
    from pagemill.engine.offline import LLM, Prompt
    from pagemill.params import RequestOutput, SamplingParams

__all__ = ["AnswerFile", "configure", "run"]

SYNC_S = 1.0
"""Most work, in seconds, that a power cut may undo."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Files, engine and sampling flags."""
    parser.add_argument("-i", "--input", default="-", metavar="FILE", help="JSONL of requests; - reads standard input.")
    parser.add_argument(
        "-o", "--output", default="-", metavar="FILE", help="JSONL of answers; an existing file is continued."
    )
    parser.add_argument("--restart", action="store_true", help="Begin again: what the output holds is thrown away.")
    add_sampling_flags(parser)
    add_config_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Answer every line; 0 if all were answered, 1 if some are errors."""
    config = config_from(args, EngineConfig)
    with _open_input(args.input) as source, AnswerFile.open(args.output, restart=args.restart) as answers:
        if answers.done:
            print(f"pagemill generate: {len(answers.done)} answers are there already", file=sys.stderr)

        from pagemill.engine.offline import LLM

        with LLM.from_config(config) as llm:
            batch = _Batch(llm, answers, sampling_values(args))
            batch.run(source, _num_lines(args.input))
    print(f"pagemill generate: {batch.summary()}", file=sys.stderr)
    return 1 if batch.num_failed else 0


def _open_input(name: str) -> BinaryIO:
    if name == "-":
        return sys.stdin.buffer
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise ConfigError(f"--input={name}: {error.strerror}") from None


def _num_lines(name: str) -> int | None:
    """Lines of the input, where it can be read twice."""
    if name == "-" or not Path(name).is_file():
        return None
    with Path(name).open("rb") as file:
        return sum(1 for line in file if line.strip())


class AnswerFile:
    """The output: whole lines only, and which requests they answer."""

    def __init__(self, file: BinaryIO, done: set[str], *, syncs: bool) -> None:
        self._file = file
        self.done = done
        """Keys of the requests that are answered."""
        self._syncs = syncs
        self._synced_s = time.monotonic()

    @classmethod
    def open(cls, name: str, *, restart: bool) -> AnswerFile:
        """Continue a file (a last line that was not finished is cut off), or write to standard output."""
        if name == "-":
            return cls(sys.stdout.buffer, set(), syncs=False)
        path = Path(name)
        try:
            done, length = (set(), 0) if restart or not path.exists() else _answered(path)
            file = path.open("ab", buffering=0)
            file.truncate(length)
        except OSError as error:
            raise ConfigError(f"--output={name}: {error.strerror}") from None
        return cls(file, done, syncs=True)

    def write(self, line: dict[str, Any]) -> None:
        """Append one answer."""
        try:
            self._file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            if time.monotonic() - self._synced_s > SYNC_S:
                self.sync()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ConfigError(f"--output: {error.strerror}; what was written is whole, run it again to go on") from None

    def sync(self) -> None:
        """Make sure that what was written survives a power cut."""
        self._file.flush()
        if self._syncs:
            os.fsync(self._file.fileno())
        self._synced_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not BrokenPipeError:
            self.sync()
        if self._syncs:
            self._file.close()


def _answered(path: Path) -> tuple[set[str], int]:
    """Keys of the answers in a file, and the length of its whole lines in bytes."""
    done: set[str] = set()
    length = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                value = json.loads(line)
                number, custom_id = value["line"], value.get("custom_id")
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(
                    f"--output={path} holds a line that is no answer of this verb; name another file or use --restart"
                ) from None
            done.add(f"line {number}" if custom_id is None else f"id {custom_id}")
            length += len(line)
    return done, length


class _Batch:
    """The work between the two files."""

    def __init__(self, llm: LLM, answers: AnswerFile, given: dict[str, Any]) -> None:
        self._llm = llm
        self._answers = answers
        self._given = given
        self._seen: dict[str, int] = {}
        """Custom id -> the line that has it."""
        self.num_done = 0
        self.num_failed = 0
        self._num_tokens = 0
        self._start_s = time.monotonic()

    def run(self, source: BinaryIO, num_lines: int | None) -> None:
        """Answer every line that is not answered yet."""
        bar: AbstractContextManager[Any] = nullcontext()
        if sys.stderr.isatty():
            from pagemill.engine.progress import RequestProgress

            bar = RequestProgress(num_lines, self._llm.metrics)
        with bar as progress:
            for line, result in self._llm.complete(self._requests(source)):
                self._take(line, result)
                if progress is not None:
                    progress.update(len(self._answers.done) + self.num_done + self.num_failed)

    def _take(self, line: BatchLine, result: RequestOutput | PagemillError) -> None:
        if isinstance(result, PagemillError):
            self._fail(line.number, line.custom_id, result)
            return
        self.num_done += 1
        self._num_tokens += sum(len(each.token_ids) for each in result.outputs)
        self._answers.write(answer(line, result, self._llm.text.name))

    def _requests(self, source: BinaryIO) -> Iterator[tuple[BatchLine, Prompt, SamplingParams]]:
        for number, raw in enumerate(source, start=1):
            if not raw.strip():
                continue
            custom_id = None
            try:
                line = parse_line(number, raw.decode())
                custom_id = line.custom_id
                if line.key in self._answers.done:
                    self._remember(line)
                    continue
                self._remember(line)
                request = line, self._prompt(line), self._params(line)
            except UnicodeDecodeError as error:
                self._fail(number, None, RequestError(f"the line is not UTF-8: {error}"))
            except RequestError as error:
                self._fail(number, custom_id, error)
            else:
                yield request

    def _remember(self, line: BatchLine) -> None:
        if line.custom_id is None:
            return
        first = self._seen.setdefault(line.custom_id, line.number)
        if first != line.number:
            raise RequestError(
                f"custom_id {line.custom_id!r} is used by line {first} already; ids must be unique", param="custom_id"
            )

    def _prompt(self, line: BatchLine) -> Prompt:
        if not line.is_chat:
            prompt = line.body["prompt"]
            if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(each) is int for each in prompt)):
                return prompt
            raise RequestError("prompt must be a string or a list of token ids; one prompt a line", param="prompt")
        messages = line.body["messages"]
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise RequestError("messages must be a list of objects", param="messages")
        rendered = self._llm.text.render_chat(messages, **template_options(line))
        return {"prompt": rendered, "add_special_tokens": False}

    def _params(self, line: BatchLine) -> SamplingParams:
        model = self._llm.text.default_values()
        # OpenAI's defaults: a completion has 16 tokens, an answer in a conversation as many as fit.
        lengths = {"max_tokens": None} if line.is_chat else {}
        return sampling_params(line, {**model, **lengths, **self._given})

    def _fail(self, number: int, custom_id: str | None, error: PagemillError) -> None:
        key = f"line {number}" if custom_id is None else f"id {custom_id}"
        if key in self._answers.done:
            return
        self.num_failed += 1
        self._answers.write(failure(number, custom_id, error))
        print(f"pagemill generate: line {number}: {error}", file=sys.stderr)

    def summary(self) -> str:
        """What was done, for people."""
        seconds = time.monotonic() - self._start_s
        return (
            f"{self.num_done} answered, {self.num_failed} failed, {self._num_tokens} tokens in {seconds:.1f} s"
            f" ({self._num_tokens / seconds:.0f} tokens/s)"
        )

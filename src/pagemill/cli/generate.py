"""``pagemill generate``: a file of prompts in, a file of answers out, as fast as the machine can.

Owns the two files. The output grows by whole lines, in the order in which answers are ready, so the work can be stopped
at any time and goes on where it stopped: what the output already answers is not asked again. A line that cannot be
served becomes an error in the output, and the others go on; continuing a file takes its errors out first, atomically,
and tries them again, so that it ends with one line for each request.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Protocol, Self

from pagemill.cli.arguments import add_config_flags, config_from
from pagemill.cli.batch_lines import (
    BatchLine,
    answer,
    conversation,
    failure,
    parse_line,
    sampling_params,
    template_options,
)
from pagemill.cli.sampling_flags import add_sampling_flags, sampling_values
from pagemill.config import EngineConfig
from pagemill.errors import ConfigError, PagemillError, RequestError

if TYPE_CHECKING:
    from pagemill.engine.offline import LLM, Prompt
    from pagemill.params import RequestOutput, SamplingParams

__all__ = ["AnswerFile", "configure", "run"]

SYNC_S = 1.0
"""Most work, in seconds, that a power cut may undo."""
TELL_S = 10.0
"""Between two lines of progress where nobody sees a bar."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Files, engine and sampling flags."""
    parser.add_argument("-i", "--input", default="-", metavar="FILE", help="JSONL of requests; - reads standard input.")
    parser.add_argument(
        "-o",
        "--output",
        default="-",
        metavar="FILE",
        help="JSONL of answers; an existing file is continued, its errors tried again.",
    )
    parser.add_argument(
        "--restart", action="store_true", help="Begin again: the answers in the output are thrown away."
    )
    add_sampling_flags(parser)
    add_config_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Answer every line; 0 if all were answered, 1 if some are errors."""
    config = config_from(args, EngineConfig)
    with _open_input(args.input) as source:
        _refuse_same_file(source, args.input, args.output)
        with AnswerFile.open(args.output, restart=args.restart) as answers:
            if answers.done or answers.num_retried:
                there = f"{len(answers.done)} answers are there already, {answers.num_retried} errors are tried again"
                print(f"pagemill generate: {there}", file=sys.stderr)

            from pagemill.engine.offline import LLM

            with LLM.from_config(config) as llm:
                batch = _Batch(llm, answers, sampling_values(args))
                batch.run(source, _num_lines(args.input))
    print(f"pagemill generate: {batch.summary()}", file=sys.stderr)
    return 1 if batch.num_failed else 0


def _refuse_same_file(source: IO[bytes], input_name: str, output_name: str) -> None:
    """Before the output is touched: what it is written over must not be what is read, under whatever name."""
    try:
        read = os.fstat(source.fileno())
        written = os.fstat(sys.stdout.fileno()) if output_name == "-" else Path(output_name).stat()
    except (OSError, ValueError):  # one of them is no file, or is not there yet
        return
    if stat.S_ISREG(read.st_mode) and os.path.samestat(read, written):
        raise ConfigError(
            f"--output={output_name} and --input={input_name} are the same file; name another file for the answers"
        )


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

    def __init__(self, file: BinaryIO, done: set[str], *, num_retried: int = 0, syncs: bool) -> None:
        self._file = file
        self.done = done
        """Keys of the requests that are answered."""
        self.num_retried = num_retried
        """Requests that had an error, which is not in the file any more."""
        self._syncs = syncs
        self._synced_s = time.monotonic()

    @classmethod
    def open(cls, name: str, *, restart: bool) -> AnswerFile:
        """Continue a file (an unfinished last line is cut off, errors are taken out), or write to standard output.

        Raises ConfigError for a file that holds something else, also with ``restart``: that is not ours to throw away.
        """
        if name == "-":
            return cls(sys.stdout.buffer, set(), syncs=False)
        path = Path(name)
        try:
            held = _held(path) if path.exists() else _Held()
            if restart:
                held = _Held()
            elif held.num_errors:
                _without_errors(path)
            file = path.open("ab", buffering=0)
            if held.num_errors == 0:
                file.truncate(held.length)
        except OSError as error:
            raise ConfigError(f"--output={name}: {error.strerror}") from None
        return cls(file, held.done, num_retried=held.num_errors, syncs=True)

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


@dataclass(slots=True)
class _Held:
    """What an output file holds."""

    done: set[str] = field(default_factory=set)
    """Keys of the answers."""
    num_errors: int = 0
    length: int = 0
    """Of its whole lines, in bytes."""


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if not isinstance(value, dict) or type(value.get("line")) is not int or not _ANSWERS & value.keys():
                raise ConfigError(
                    f"--output={path} holds a line that is no answer of this verb; name another file for the answers"
                )
            yield line, value


_ANSWERS = {"choices", "response", "error"}
"""One of these is in each line of an output."""


def _held(path: Path) -> _Held:
    held = _Held()
    for line, value in _whole_lines(path):
        held.length += len(line)
        if value.get("error") is not None:
            held.num_errors += 1
        else:
            custom_id = value.get("custom_id")
            held.done.add(f"line {value['line']}" if custom_id is None else f"id {custom_id}")
    return held


def _without_errors(path: Path) -> None:
    """Put a copy that holds only the answers in the file's place, whole or not at all."""
    path = path.resolve()  # a link stays one
    copy = path.with_name(path.name + ".tmp")
    with copy.open("wb") as file:
        for line, value in _whole_lines(path):
            if value.get("error") is None:
                file.write(line)
        file.flush()
        os.fsync(file.fileno())
    copy.chmod(stat.S_IMODE(path.stat().st_mode))
    copy.replace(path)


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
        self._start_s = time.monotonic()
        self._before_tokens = llm.metrics.generation_tokens

    def run(self, source: BinaryIO, num_lines: int | None) -> None:
        """Answer every line that is not answered yet."""
        with self._progress(num_lines) as progress:
            for (line, params), result in self._llm.complete(self._requests(source)):
                self._take(line, params, result)
                progress.update(len(self._answers.done) + self.num_done + self.num_failed)

    def _progress(self, num_lines: int | None) -> AbstractContextManager[_Progress]:
        if not sys.stderr.isatty():
            return _Lines(self.summary)

        from pagemill.engine.progress import RequestProgress

        return RequestProgress(num_lines, self._llm.metrics)

    def _take(self, line: BatchLine, params: SamplingParams, result: RequestOutput | PagemillError) -> None:
        if isinstance(result, PagemillError):
            self._fail(line.number, line.custom_id, result)
            return
        self.num_done += 1
        self._answers.write(answer(line, result, params, self._llm.text.name, self._llm.tokenizer))

    def _requests(self, source: BinaryIO) -> Iterator[tuple[tuple[BatchLine, SamplingParams], Prompt, SamplingParams]]:
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
                self._check_model(line)
                params = self._params(line)
                request = (line, params), self._prompt(line), params
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

    def _check_model(self, line: BatchLine) -> None:
        """As a server does: absent means the one there is, any other name must be its."""
        name, model = line.body.get("model"), self._llm.text.name
        if name and name != model:
            raise RequestError(f"the model {str(name)[:200]!r} is not the one that runs, {model!r}", param="model")

    def _prompt(self, line: BatchLine) -> Prompt:
        if not line.is_chat:
            prompt = line.body["prompt"]
            if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(each) is int for each in prompt)):
                return prompt
            raise RequestError("prompt must be a string or a list of token ids; one prompt a line", param="prompt")
        rendered = self._llm.text.render_chat(conversation(line), **template_options(line))
        return {"prompt": rendered, "add_special_tokens": False}

    def _params(self, line: BatchLine) -> SamplingParams:
        model = self._llm.text.default_values()
        # OpenAI's defaults: a completion has 16 tokens, an answer in a conversation as many as fit.
        lengths = {"max_tokens": None} if line.is_chat else {}
        return sampling_params(line, {**model, **lengths, **self._given})

    def _fail(self, number: int, custom_id: str | None, error: PagemillError) -> None:
        self.num_failed += 1
        self._answers.write(failure(number, custom_id, error))
        print(f"pagemill generate: line {number}: {error}", file=sys.stderr)

    def summary(self) -> str:
        """What was done, for people."""
        seconds = time.monotonic() - self._start_s
        tokens = self._llm.metrics.generation_tokens - self._before_tokens
        return (
            f"{self.num_done} answered, {self.num_failed} failed, {tokens} tokens in {seconds:.1f} s"
            f" ({tokens / seconds:.0f} tokens/s)"
        )


class _Progress(Protocol):
    def update(self, done: int) -> None:
        """So many requests are finished."""


class _Lines:
    """Progress for a log: a line every ``TELL_S`` seconds, also while one long answer is all that runs.

    The thread sleeps but for these lines, so it takes no time from the kernels.
    """

    def __init__(self, tell: Callable[[], str]) -> None:
        self._tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def update(self, done: int) -> None:
        """The lines say it when they are due."""

    def _run(self) -> None:
        while not self._over.wait(TELL_S):
            print(f"pagemill generate: {self._tell()} so far", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

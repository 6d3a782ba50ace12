"""One line of JSON for each finished request, and for each that was refused: ids, times, counts, reasons.

Owns the lines' shape, and the thread that writes them: whoever reads them may be slow or stuck, and then lines are lost
and counted, and requests are not held up. Prompts and outputs are in a line only with ``--enable-log-content``.
"""

from __future__ import annotations

import logging
import queue
import threading
from datetime import UTC, datetime
from typing import Any, Protocol, TextIO

import msgspec

from pagemill.engine.caller import Caller
from pagemill.engine.record import RequestRecord

__all__ = ["NoLog", "RefusalLog", "RequestLog"]

logger = logging.getLogger("pagemill.server")

MAX_LINES = 10_000
"""Lines that wait to be written; more are lost."""
CLOSE_S = 2.0
SHOWN_PARAMS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
)


class RefusalLog(Protocol):
    """What is told of requests that are answered with an error."""

    def refused(self, caller: Caller, method: str, status: int, duration_s: float) -> None: ...


class NoLog:
    """Nothing is written down."""

    def refused(self, caller: Caller, method: str, status: int, duration_s: float) -> None:
        """Forget it."""


class RequestLog:
    """Writes to ``stream``. Content is cut to ``max_chars`` characters; None: not at all."""

    def __init__(self, stream: TextIO, model_name: str, *, max_chars: int | None = None) -> None:
        self._stream = stream
        self._model_name = model_name
        self._max_chars = max_chars
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_LINES)
        self._num_lost = 0
        self._thread = threading.Thread(target=self._write, name="pagemill-request-log", daemon=True)
        self._thread.start()

    def finished(self, record: RequestRecord) -> None:
        """A request that the engine knew has ended, however it did."""
        line = {
            "event": "request",
            "time": _time(record.ended_s),
            "id": record.request_id,
            **_who(record.caller),
            "model": self._model_name,
            "stream": record.streams,
            "n": record.params.n,
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_cached_tokens,
            "completion_tokens": record.num_output_tokens,
            "finish_reasons": record.finish_reasons,
            "error": record.error,
            "preemptions": record.num_preemptions,
            "queue_s": round(record.queue_s, 6),
            "first_token_s": None if record.first_token_s is None else round(record.first_token_s, 6),
            "e2e_s": round(record.e2e_s, 6),
            "params": {name: getattr(record.params, name) for name in SHOWN_PARAMS},
        }
        if record.prompt is not None:
            line["prompt"] = record.prompt[: self._max_chars]
            line["outputs"] = [text[: self._max_chars] for text in record.outputs or ()]
        self._put(line)

    def refused(self, caller: Caller, method: str, status: int, duration_s: float) -> None:
        """A request was answered with an error."""
        now_s = datetime.now(UTC).timestamp()
        line = {"event": "refused", "time": _time(now_s), **_who(caller), "method": method, "status": status}
        self._put(line | {"e2e_s": round(duration_s, 6)})

    def _put(self, line: dict[str, Any]) -> None:
        try:
            self._lines.put_nowait(msgspec.json.encode(line) + b"\n")
        except queue.Full:
            self._num_lost += 1

    def close(self) -> None:
        """Write what waits, unless nobody takes it."""
        try:
            self._lines.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _write(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                if self._num_lost:
                    lost, self._num_lost = self._num_lost, 0
                    self._stream.write(f'{{"event":"lost","lines":{lost}}}\n')
                self._stream.write(line.decode())
                if self._lines.empty():
                    self._stream.flush()
            self._stream.flush()
        except OSError as error:
            logger.error("the request log ends: %s", error)
        except ValueError:
            logger.error("the request log ends: its file was closed")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _who(caller: Caller) -> dict[str, str]:
    return {"route": caller.route[:200], "key": caller.name, "client": caller.address}

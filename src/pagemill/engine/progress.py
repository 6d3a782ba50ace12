"""The progress bar of offline work: requests done, and tokens per second."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pagemill.engine.metrics import Metrics

__all__ = ["RequestProgress"]

REDRAW_S = 0.1


class RequestProgress:
    """Redrawn a few times a second by whoever drives the engine; no thread of its own takes time from the kernels."""

    def __init__(self, total: int | None, metrics: Metrics) -> None:
        self._metrics = metrics
        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            auto_refresh=False,
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("requests", total=total, speed="")
        self._start_s = time.monotonic()
        self._drawn_s = 0.0
        self._before = metrics.prompt_tokens, metrics.generation_tokens

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.refresh()
        self._bar.stop()

    def update(self, done: int) -> None:
        """So many requests are finished."""
        now_s = time.monotonic()
        finished = done == self._bar.tasks[0].total
        if now_s - self._drawn_s < REDRAW_S and not finished:
            return
        self._drawn_s = now_s
        elapsed_s = max(now_s - self._start_s, 1e-9)
        speeds = (
            (now - before) / elapsed_s
            for now, before in zip(
                (self._metrics.prompt_tokens, self._metrics.generation_tokens), self._before, strict=True
            )
        )
        self._bar.update(self._task, completed=done, speed="in {:.0f} tok/s, out {:.0f} tok/s".format(*speeds))
        self._bar.refresh()

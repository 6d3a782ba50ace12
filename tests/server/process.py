"""``pagemill serve`` as its users start it: a process, found by what it prints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

__all__ = ["ServeProcess", "serve_process"]

END_S = 60


@dataclass
class ServeProcess:
    """A running server."""

    process: subprocess.Popen[str]
    url: str
    said: str
    """What it printed up to the address."""

    @property
    def engine_pid(self) -> int:
        """Its child that runs the model."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        children += [child for thread in threads for child in (thread / "children").read_text().split()]
        (pid,) = {int(child) for child in children}
        return pid

    def end(self, kind: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(kind)
        return self.process.wait(END_S)


@contextmanager
def serve_process(*words: str) -> Iterator[ServeProcess]:
    """Start on a free port; yields once it listens."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "pagemill", "serve", *words, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield ServeProcess(process, *_address(process))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _address(process: subprocess.Popen[str]) -> tuple[str, str]:
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        found = re.search(r"web page: (http://\S+)/", line)
        if found:
            httpx.get(found[1] + "/health").raise_for_status()
            return found[1], said
    raise AssertionError(f"the server ended with code {process.wait()} and said: {said}")

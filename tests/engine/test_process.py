"""The child process: it lives as long as its front, and the front learns of its end from the kernel."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from pagemill.engine.process import EngineProcess, Heartbeat


def test_the_child_ends_when_its_front_is_killed() -> None:
    code = """
import os, signal
from pagemill.engine.process import EngineProcess
print(EngineProcess.spawn().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    front = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pidfd = os.pidfd_open(int(front.stdout))
    try:
        assert select.select([pidfd], [], [], 60.0)[0]
    finally:
        os.close(pidfd)


def test_a_killed_child_shows_its_signal() -> None:
    process = EngineProcess.spawn()
    assert not process.ended.done()
    process.kill()
    assert process.ended.result() == -9
    process.discard()


def test_a_heartbeat_is_seen_through_its_file(tmp_path: Path) -> None:
    heard = Heartbeat.create(tmp_path / "beat")
    first = heard.age_s()
    Heartbeat(tmp_path / "beat").beat()
    assert 0 <= heard.age_s() <= first + 60
    assert heard.age_s() < 60

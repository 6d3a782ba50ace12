"""One server with the embedded model for all programs, and where their interpreters are.

Programs that need another version of a package than the product's own tests run in a virtual environment of their own,
``.venv-clients`` (``make clients``), as processes: each is a script that asserts what it expects, and is told where the
server is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagemill.models.sources import ModelSource
from tests.server.process import ServeProcess, serve_process

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
MODEL = "smollm2"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
NODE_MODULES = ROOT / ".venv-clients" / "node_modules"
PROGRAM_S = 900
"""Only a bound on a hang."""


@pytest.fixture(scope="session")
def server(embedded_source: ModelSource) -> Iterator[ServeProcess]:
    """The embedded model under a short name."""
    with serve_process("--served-model-name", MODEL, "--max-num-seqs", "16", "--max-model-len", "4096") as running:
        yield running


@pytest.fixture(scope="session")
def embedder() -> Iterator[ServeProcess]:
    """The embedded encoder under the same short name."""
    with serve_process("all-minilm-l6-v2", "--served-model-name", MODEL) as running:
        yield running


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Run a script of ``programs/`` against a server, in the clients' environment; its standard output."""
    if not PYTHON.exists():
        pytest.skip("the clients are not installed (make clients)")
    return lambda server, *words: _run([str(PYTHON), "-W", "ignore", *words], server)


@pytest.fixture
def run_node() -> Callable[..., str]:
    """Run a script of ``programs/`` against a server, with Node.js; its standard output."""
    node = shutil.which("node")
    if node is None or not NODE_MODULES.exists():
        pytest.skip("Node.js, or its client, is not installed (make clients)")
    return lambda server, *words: _run([node, *words], server)


def _run(command: list[str], server: ServeProcess) -> str:
    told = {
        "OPENAI_BASE_URL": server.url + "/v1",
        "OPENAI_API_KEY": "none",
        "PAGEMILL_MODEL": MODEL,
        "PAGEMILL_NODE_MODULES": str(NODE_MODULES),
    }
    ended = subprocess.run(
        command, cwd=PROGRAMS, env=os.environ | told, timeout=PROGRAM_S, text=True, capture_output=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-6000:]
    return ended.stdout

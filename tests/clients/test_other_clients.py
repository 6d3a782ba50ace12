"""Other programs hold a conversation with the server: each script of ``programs/`` asserts what it gets."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.clients.conftest import PROGRAM_S
from tests.server.process import ServeProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PROGRAM_S)]


@pytest.mark.parametrize("name", ["litellm", "langchain", "llama_index", "pydantic_ai"])
def test_a_conversation(run_python: Callable[..., str], server: ServeProcess, name: str) -> None:
    run_python(server, f"{name}_conversation.py")


def test_a_conversation_in_node(run_node: Callable[..., str], server: ServeProcess) -> None:
    run_node(server, "openai_conversation.mjs")


def test_vectors(run_python: Callable[..., str], embedder: ServeProcess) -> None:
    run_python(embedder, "vectors.py")


def test_vectors_in_node(run_node: Callable[..., str], embedder: ServeProcess) -> None:
    run_node(embedder, "openai_vectors.mjs")


@pytest.mark.parametrize("kind", ["chat_model", "embeddings"])
def test_langchains_own_tests(run_python: Callable[..., str], request: pytest.FixtureRequest, kind: str) -> None:
    running = request.getfixturevalue("embedder" if kind == "embeddings" else "server")
    run_python(
        running, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir", ".",
        "-o", "asyncio_mode=auto", f"langchain_{kind}.py",
    )  # fmt: skip

"""Other programs hold a conversation with the server: each script of ``programs/`` asserts what it gets."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.clients.conftest import PROGRAM_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PROGRAM_S)]


@pytest.mark.parametrize("name", ["litellm", "langchain", "llama_index", "pydantic_ai"])
def test_a_conversation(python_program: Callable[..., str], name: str) -> None:
    python_program(f"{name}_conversation.py")


def test_a_conversation_in_node(node_program: Callable[..., str]) -> None:
    node_program("openai_conversation.mjs")


def test_langchains_own_tests_of_a_chat_model(python_program: Callable[..., str]) -> None:
    python_program(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir", ".",
        "-o", "asyncio_mode=auto", "langchain_standard.py",
    )  # fmt: skip

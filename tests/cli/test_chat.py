"""``pagemill chat``: several turns, commands, and Ctrl-C that stops an answer and not the program."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from pagemill.cli import main
from pagemill.cli.chat import Conversation
from pagemill.errors import PromptTooLongError
from tests.models.tiny import tiny_llama


class Echo:
    """Answers with what it was told, word by word."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.shown = ""
        self.interrupt_after: int | None = None
        self.closed = 0

    def __call__(self, messages: list[dict[str, Any]]) -> Generator[str, None, None]:
        self.asked.append([dict(message) for message in messages])
        try:
            for count, word in enumerate(messages[-1]["content"].split()):
                if count == self.interrupt_after:
                    raise KeyboardInterrupt
                yield f"<{word}>"
        finally:
            self.closed += 1

    def show(self, text: str) -> None:
        self.shown += text


def talk(echo: Echo, *lines: str, system: str | None = None) -> Conversation:
    conversation = Conversation(echo, system, echo.show)
    for line in lines:
        assert conversation.take(line)
    return conversation


def test_every_turn_sees_the_ones_before() -> None:
    echo = Echo()
    conversation = talk(echo, "one two", "", "three", system="be brief")
    assert echo.shown == "<one><two>\n<three>\n"
    assert [message["content"] for message in echo.asked[1]] == ["be brief", "one two", "<one><two>", "three"]
    assert [message["role"] for message in conversation.messages[1:]] == ["user", "assistant"] * 2


def test_clear_and_system_forget_the_conversation() -> None:
    echo = Echo()
    conversation = talk(echo, "one", "/clear")
    assert conversation.messages == []
    talk_on = ["/system be kind", "two"]
    assert all(conversation.take(line) for line in talk_on)
    assert [message["content"] for message in echo.asked[-1]] == ["be kind", "two"]
    assert conversation.take("/system")
    assert conversation.messages == []


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said() -> None:
    echo = Echo()
    echo.interrupt_after = 2
    conversation = talk(echo, "one two three four")
    assert conversation.messages[-1]["content"] == "<one><two>"
    assert "(stopped)" in echo.shown
    assert echo.closed == 1


def test_a_refused_message_is_not_part_of_the_conversation() -> None:
    def refuses(messages: list[dict[str, Any]]) -> Generator[str, None, None]:
        raise PromptTooLongError("the prompt has 900 tokens")
        yield ""

    shown: list[str] = []
    conversation = Conversation(refuses, None, shown.append)
    assert conversation.take("too long")
    assert conversation.messages == []
    assert "900 tokens" in "".join(shown)


def test_retry_asks_again_and_unknown_commands_say_so() -> None:
    echo = Echo()
    conversation = talk(echo, "/retry", "one", "/retry", "/nope", "/help")
    assert len(echo.asked) == 2
    assert echo.asked[0] == echo.asked[1]
    assert "no message" in echo.shown
    assert "/nope" in echo.shown
    assert "/system TEXT" in echo.shown
    assert not conversation.take("/exit")


def test_a_real_model_answers_until_the_end_of_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(tmp_path / "tiny-llama")
    lines = iter(["hi"])

    def typed(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    engine = ["--dtype", "float32", "--num-threads", "1", "--num-gpu-blocks-override", "64"]
    assert main(["chat", str(model), "--max-tokens", "4", *engine]) == 0
    assert capsys.readouterr().out.count("\n") >= 1


ENGINE = ["--dtype", "float32", "--num-threads", "1", "--num-gpu-blocks-override", "64"]


def test_a_model_that_makes_vectors_is_refused_before_the_first_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(tmp_path / "tiny-llama")
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("it asked for a message"))
    assert main(["chat", str(model), "--runner", "pooling", *ENGINE]) == 2
    assert "makes vectors and no text" in capsys.readouterr().err


def test_a_template_may_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(tmp_path / "tiny-llama")
    lines = iter(["hi", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    refusing = "{{ raise_exception('asked with ' ~ messages[0].content) }}"
    assert main(["chat", str(model), "--chat-template", refusing, *ENGINE]) == 0
    assert "asked with hi" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["chat", "serve"])
def test_a_template_that_does_not_compile_ends_the_start(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "/no/such/model", "--chat-template", "{% for message in %}"]) == 2
    shown = capsys.readouterr().err
    assert "--chat-template does not compile: line 1" in shown
    assert shown.count("pagemill:") == 1

"""Reasoning apart from the answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.server.parsers.answer import AnswerParser, Message
from pagemill.server.parsers.reasoning import REASONING_FORMATS, ReasoningParser


def read(form: str, prompt: str, pieces: Sequence[str]) -> tuple[str | None, str | None]:
    parser = AnswerParser(ReasoningParser(REASONING_FORMATS[form], prompt), None, parallel=True)
    message = Message()
    for piece in pieces:
        message.add(parser.feed(piece))
    message.add(parser.finish())
    answer = message.as_dict("assistant", "", include_reasoning=True)
    return answer.get("reasoning_content"), answer["content"]


@pytest.mark.parametrize(
    ("form", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", "", "<think>\nso so\n</think>\n\nYes.", "so so", "Yes."),
        ("qwen3", "", "\n<think>so</think>Yes.\n", "so", "Yes.\n"),
        ("qwen3", "", "Yes <think>.", None, "Yes <think>."),
        ("qwen3", "", "<thin", None, "<thin"),
        ("qwen3", "", " no tag", None, " no tag"),
        ("qwen3", "", "<think></think>Yes", None, "Yes"),
        ("qwen3", "<think>\n", "so</think>Yes", "so", "Yes"),
        ("qwen3", "<think>\n\n</think>\n\n", "Yes", None, "Yes"),
        ("qwen3", "", "<think>cut </thi", "cut </thi", None),
        ("deepseek_r1", "", "so\n</think>Yes", "so", "Yes"),
        ("deepseek_r1", "", "<think>so</think>Yes", "so", "Yes"),
        ("mistral", "", "[THINK]so[/THINK]Yes", "so", "Yes"),
    ],
)
def test_what_was_thought_and_what_was_said(
    form: str, prompt: str, text: str, reasoning: str | None, content: str | None
) -> None:
    assert read(form, prompt, [text]) == (reasoning, content)
    assert read(form, prompt, list(text)) == (reasoning, content)


texts = st.lists(
    st.one_of(st.sampled_from(["<think>", "</think>", "<", "</th", " ", "\n", "a", " " * 40]), st.text(max_size=3)),
    max_size=10,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(REASONING_FORMATS)), st.sampled_from(["", "<think>\n"]), texts, st.data())
def test_however_a_text_is_cut_it_reads_the_same(form: str, prompt: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, prompt, pieces) == read(form, prompt, [text]) == read(form, prompt, list(text))

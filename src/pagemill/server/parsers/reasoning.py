"""What a model thinks before it answers, by the tags it puts around it."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.server.parsers.deltas import Delta, Reasoning, Text

__all__ = ["REASONING_FORMATS", "ReasoningFormat", "ReasoningParser"]

BLANKS = " \t\r\n"
MAX_BLANKS = 64
"""An opening tag comes after so many blanks at most."""


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """The tags, and how an output begins."""

    open: str
    close: str
    opens_itself: bool = False
    """An output begins inside, tag or no tag."""
    special: bool = False
    """The tags are special tokens, which must reach the text."""


REASONING_FORMATS = {
    "qwen3": ReasoningFormat(open="<think>", close="</think>"),
    "deepseek_r1": ReasoningFormat(open="<think>", close="</think>", opens_itself=True),
    "mistral": ReasoningFormat(open="[THINK]", close="[/THINK]", special=True),
}


class ReasoningParser:
    """Splits one output in two. Thinking comes first or not at all; blanks around the tags are dropped."""

    def __init__(self, form: ReasoningFormat, prompt: str) -> None:
        self._form = form
        end = prompt.rstrip(BLANKS)
        self._inside = end.endswith(form.open) or (form.opens_itself and not end.endswith(form.close))
        self._begun = False
        """What follows the first tag, or its absence, has begun."""
        self._text = ""
        self._blanks: list[str] = []
        self._answering = False
        self._fresh = False
        """Right after the closing tag."""

    def feed(self, text: str) -> list[Delta]:
        """What the next piece settles."""
        if self._answering:
            return self._answer(text)
        self._text += text
        if not self._begun and not self._begin():
            return []
        if not self._inside:
            self._answering = True
            rest, self._text = self._text, ""
            return self._answer(rest)
        return self._think()

    def finish(self) -> list[Delta]:
        """What was held back."""
        rest, self._text = self._text, ""
        if self._answering or not rest:
            return []
        if self._inside:
            rest = rest.rstrip(BLANKS)
            return [Reasoning("".join(self._blanks) + rest)] if rest else []
        return [Text(rest)]

    def _begin(self) -> bool:
        """Whether it is clear how the output begins; takes the opening tag off."""
        bare = self._text.lstrip(BLANKS)
        if self._inside:
            self._text = bare
        near = len(self._text) - len(bare) <= MAX_BLANKS
        if near and len(bare) < len(self._form.open) and self._form.open.startswith(bare):
            return False
        self._begun = True
        if near and bare.startswith(self._form.open):
            self._inside = True
            self._text = bare[len(self._form.open) :]
            self._fresh = True
        elif self._inside:
            self._fresh = True
        return True

    def _think(self) -> list[Delta]:
        found = self._text.find(self._form.close)
        if found >= 0:
            thought, rest = self._text[:found], self._text[found + len(self._form.close) :]
            out = self._thought(thought)
            self._text, self._blanks = "", []
            self._answering = self._fresh = True
            return out + self._answer(rest)
        keep = _overlap(self._text, self._form.close)
        thought, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        return self._thought(thought)

    def _thought(self, text: str) -> list[Delta]:
        if self._fresh:
            text = text.lstrip(BLANKS)
            if not text:
                return []
            self._fresh = False
        solid = text.rstrip(BLANKS)
        out: list[Delta] = []
        if solid:
            out.append(Reasoning("".join(self._blanks) + solid))
            self._blanks = []
        if len(solid) < len(text):
            self._blanks.append(text[len(solid) :])
        return out

    def _answer(self, text: str) -> list[Delta]:
        if self._fresh:
            text = text.lstrip(BLANKS)
            self._fresh = not text
        return [Text(text)] if text else []


def _overlap(text: str, tag: str) -> int:
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[len(text) - size :]):
            return size
    return 0

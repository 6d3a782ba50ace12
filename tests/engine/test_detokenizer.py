"""Text grows by whole code points, is what the whole sequence decodes to, and stop strings never leak."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.detokenizer import Detokenizer, StopStrings, Vocabulary, _StopAutomaton
from tests.engine.fakes import VOCAB_SIZE, byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
BYTE_VOCABULARY = Vocabulary(BYTE_LEVEL)
PIECES = sentencepiece_tokenizer()
PIECE_VOCABULARY = Vocabulary(PIECES)


def pieces_of(vocabulary: Vocabulary, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(vocabulary, **options)
    return [*(detokenizer.feed([token]) for token in ids), detokenizer.close()]


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40), st.booleans())
def test_any_ids_give_the_text_of_the_whole_sequence(ids: list[int], skip: bool) -> None:
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces_of(BYTE_VOCABULARY, ids, skip_special_tokens=skip)) == whole
    at_once = Detokenizer(BYTE_VOCABULARY, skip_special_tokens=skip)
    assert at_once.feed(ids) + at_once.close() == whole


@given(st.text(max_size=30))
def test_every_prefix_shows_only_whole_code_points(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    pieces = pieces_of(BYTE_VOCABULARY, ids)
    shown = ""
    for piece in pieces:
        shown += piece
        assert text.startswith(shown)
    assert shown == text


@pytest.mark.parametrize("text", ["😀", "é", "x😀y", "नमस्ते", "👩‍👩‍👧‍👦"])
def test_a_code_point_split_over_tokens_arrives_once_and_whole(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)
    pieces = [piece for piece in pieces_of(BYTE_VOCABULARY, ids) if piece]
    assert pieces == list(text)


def test_an_unfinished_code_point_shows_as_a_replacement_at_the_end_only() -> None:
    ids = BYTE_LEVEL.encode("a😀", add_special_tokens=False)[:-1]
    assert pieces_of(BYTE_VOCABULARY, ids) == ["a", "", "", "", "�"]


def test_bytes_fall_back_in_a_sentencepiece_vocabulary() -> None:
    ids = PIECES.encode("the world 😀.", add_special_tokens=False)
    assert "".join(pieces_of(PIECE_VOCABULARY, ids, at_start=True)) == "the world 😀."


@given(st.text(alphabet="worldeHé .😀ß", min_size=1, max_size=20), st.integers(0, 30))
@settings(max_examples=50)
def test_output_text_continues_the_prompt_in_a_sentencepiece_vocabulary(text: str, cut: int) -> None:
    ids = PIECES.encode(text, add_special_tokens=False)
    prompt, output = ids[:cut], ids[cut:]
    continued = "".join(pieces_of(PIECE_VOCABULARY, output, at_start=not prompt))
    before = "".join(pieces_of(PIECE_VOCABULARY, prompt, at_start=True)[:-1])
    if "�" not in continued:
        assert before + continued == PIECES.decode(ids)


def test_a_leading_space_is_kept_after_a_prompt_and_dropped_at_the_start() -> None:
    ids = [PIECES.token_to_id("▁world")]
    assert "".join(pieces_of(PIECE_VOCABULARY, ids)) == " world"
    assert "".join(pieces_of(PIECE_VOCABULARY, ids, at_start=True)) == "world"
    space = BYTE_LEVEL.encode(" x", add_special_tokens=False)
    assert "".join(pieces_of(BYTE_VOCABULARY, space, at_start=True)) == " x"


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [3, *BYTE_LEVEL.encode("hi", add_special_tokens=False), 4]
    assert "".join(pieces_of(BYTE_VOCABULARY, ids)) == "hi"
    assert "".join(pieces_of(BYTE_VOCABULARY, ids, skip_special_tokens=False)) == "<|im_start|>hi<|im_end|>"


def shown_by(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    text = ""
    for piece in pieces:
        text += matcher.feed(piece, include=include)
        if matcher.matched is not None:
            return text, matcher.matched
    return text + matcher.close(), None


def test_a_stop_string_spread_over_pieces_never_shows() -> None:
    matcher = StopStrings(["\nObservation"])
    assert [matcher.feed(piece) for piece in ["think\n", "Obs", "erv", "ation: x"]] == ["think", "", "", ""]
    assert matcher.matched == "\nObservation"


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["abcd"])
    assert [matcher.feed(piece) for piece in ["x", "ab", "x", "abc", "abc"]] == ["x", "", "abx", "", "abc"]
    assert matcher.close() == "abc"


def test_the_stop_string_is_kept_on_request_but_nothing_after_it() -> None:
    assert shown_by(["END"], ["one E", "ND two"], include=True) == ("one END", "END")
    assert shown_by(["END"], ["one E", "ND two"]) == ("one ", "END")


def test_overlapping_stop_strings_stop_at_the_first_that_is_complete() -> None:
    assert shown_by(["abcx", "bc"], ["a", "b", "c", "x"]) == ("a", "bc")
    assert shown_by(["bc", "abc"], ["zabc"]) == ("z", "abc")
    assert shown_by(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")


texts = st.text(alphabet="ab", max_size=25)


@given(texts, st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=3), st.data())
def test_stopping_does_not_depend_on_how_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, matched = shown_by(stops, pieces)
    assert (shown, matched) == shown_by(stops, [text])
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (shown, matched) == (text, None)
    else:
        assert matched is not None
        assert shown + matched == text[: min(ends)]
        assert not any(stop in shown for stop in stops)


def test_a_long_repetitive_stop_string_costs_no_more_than_its_length() -> None:
    matcher = StopStrings(["a" * 10_000 + "b"])
    shown = sum(len(matcher.feed("a" * 1000)) for _ in range(100))
    assert shown == 90_000
    assert len(matcher.close()) == 10_000


def test_a_thousand_stop_strings_cost_no_more_than_one_for_each_character() -> None:
    stops = tuple("e" * (1 + index % 16) + f"{index}" for index in range(1000))
    automaton = _StopAutomaton(stops)
    looked_up = 0

    class Counting(dict[tuple[int, str], int]):
        def get(self, key: tuple[int, str], default: int | None = None) -> int | None:  # type: ignore[override]
            nonlocal looked_up
            looked_up += 1
            return super().get(key, default)

    automaton._edges = Counting(automaton._edges)
    state = 0
    for char in "e" * 5000 + "x":
        state = automaton.step(state, char)
    assert looked_up <= 2 * 5001

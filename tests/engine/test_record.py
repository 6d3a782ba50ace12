"""What is told of a finished request: counts and times that add up, and content only where asked for."""

from __future__ import annotations

import pytest

from pagemill.engine.record import RequestRecord
from tests.engine.fakes import scripted
from tests.engine.harness import Engine


def test_a_record_says_what_happened_to_all_completions_of_a_request() -> None:
    engine = Engine()
    records: list[RequestRecord] = []
    engine.output.observers.append(records.append)
    engine.ask([7] * 12, max_tokens=5, n=2, ignore_eos=True, temperature=0.5, request_id="first")
    engine.finish()
    engine.ask([7] * 12, max_tokens=3, ignore_eos=True, kind="final")
    engine.finish()
    first, second = records
    assert (first.request_id, first.streams, second.streams) == ("first", True, False)
    assert (first.num_prompt_tokens, first.num_output_tokens, second.num_output_tokens) == (12, 10, 3)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert first.finish_reasons == ["length", "length"]
    assert first.params.temperature == 0.5
    assert first.first_token_s is not None
    assert first.queue_s + first.prefill_s == pytest.approx(first.first_token_s)
    assert first.queue_s + first.prefill_s + first.decode_s == pytest.approx(first.e2e_s)
    assert first.prompt is None
    assert first.outputs is None


def test_an_aborted_request_is_told_of_once_with_what_it_had() -> None:
    engine = Engine()
    records: list[RequestRecord] = []
    engine.output.observers.append(records.append)
    begun, waiting = engine.ask([7, 4], max_tokens=9, ignore_eos=True), engine.ask([8, 4], max_tokens=9)
    engine.step()
    engine.abort(begun)
    engine.abort(waiting)
    engine.finish()
    assert [record.finish_reasons for record in records] == [["abort"], ["abort"]]
    assert records[0].num_output_tokens == 1


def test_content_is_kept_only_where_asked_for() -> None:
    engine = Engine(scripted([5, 6, 7]))
    records: list[RequestRecord] = []
    engine.output.observers.append(records.append)
    engine.output.keeps_content = True
    state = engine.ask([40, 4], max_tokens=3, ignore_eos=True)
    engine.stream(state)
    (record,) = records
    assert record.prompt == engine.tokenizer.decode([40, 4], skip_special_tokens=False)
    assert record.outputs == [engine.tokenizer.decode([5, 6, 7], skip_special_tokens=False)]


def test_an_observer_that_fails_hurts_no_request() -> None:
    engine = Engine()

    def fail(record: RequestRecord) -> None:
        raise ZeroDivisionError

    engine.output.observers.append(fail)
    state = engine.ask([7, 4], max_tokens=3, ignore_eos=True)
    engine.finish()
    assert state.finished

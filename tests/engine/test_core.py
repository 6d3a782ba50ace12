"""The order of a step's effects, admin operations, and what crosses the border to the engine's process."""

from __future__ import annotations

import msgspec
import pytest

import pagemill.engine.core as core_module
from pagemill.core.messages import EngineOutput, SchedulerOutput
from pagemill.engine.core import NoGrammars
from pagemill.engine.wire import Add, Call, FromEngine, StepOutputs, StepStats, Stop, ToEngine, raised, reported
from pagemill.errors import EngineError, MemoryPlanError, PromptTooLongError, RequestError
from pagemill.params import FinishReason, SamplingParams
from tests.engine.harness import Engine


@pytest.mark.parametrize(
    ("asynchronous", "order"),
    [
        (False, ["execute", "sample", "send"] * 3),
        (True, ["execute", "sample", "execute", "send", "sample", "execute", "send", "sample", "send"]),
    ],
)
def test_outputs_are_sent_at_once_or_while_the_next_forward_pass_runs(asynchronous: bool, order: list[str]) -> None:
    engine = Engine()
    engine.executor.asynchronous = asynchronous
    events = engine.executor.events
    received = engine.core._sink
    engine.core._sink = lambda message: (events.append("send"), received(message))
    engine.ask([7, 4], max_tokens=3)
    while engine.core.step():
        pass
    assert events == order


def test_masks_are_begun_before_the_forward_pass_and_taken_after_it() -> None:
    engine = Engine()
    events = engine.executor.events

    class Watched(NoGrammars):
        def begin(self, plan: SchedulerOutput) -> None:
            events.append("begin")

        def constraints(self) -> None:
            events.append("constraints")

    engine.core._grammars = Watched()
    engine.ask([7, 4], max_tokens=2)
    engine.finish()
    assert events == ["begin", "execute", "constraints", "sample"] * 2


def test_one_message_carries_a_whole_step() -> None:
    engine = Engine()
    sent: list[object] = []
    received = engine.core._sink
    engine.core._sink = lambda message: (sent.append(message), received(message))
    for token in range(5, 15):
        engine.ask([token, 4], max_tokens=4)
    engine.finish()
    assert len(sent) == 4


def test_a_step_takes_in_a_bounded_number_of_tokens_and_those_who_decode_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "TAKEN_IN_A_STEP", 60)
    engine = Engine()
    decoding = engine.ask([7, 4], max_tokens=40)
    engine.step()
    decoding.take()
    states = [engine.ask([number, *range(20, 39)], max_tokens=2) for number in range(5, 25)]
    queued, told = [], []
    for _ in range(4):
        engine.step()
        queued.append(engine.core.scheduler._num_added)
        told.append(decoding.take())
    assert queued == [1 + 3, 1 + 6, 1 + 9, 1 + 12]
    assert all(output is not None for output in told)
    assert engine.core._stats(0.0, 0.0, 0).num_waiting == 20 - 12 + engine.core.scheduler.stats().num_waiting
    engine.abort(states[19])  # which the engine has not taken in yet
    engine.abort(states[0])
    engine.finish()
    assert all(state.finished and state.error is None for state in states)
    assert [state.take() is not None for state in states[1:19]] == [True] * 18
    assert not engine.core._arriving


def test_completions_of_one_prompt_send_it_once_and_are_taken_in_together() -> None:
    engine = Engine(max_model_len=400, num_blocks=200)
    prompt = [5 + number % 300 for number in range(300)]
    alone, many = (engine.input.prepare(prompt, SamplingParams(n=n), "id", arrival_s=0.0).requests for n in (1, 64))
    sent = [len(msgspec.msgpack.encode(Add(requests))) for requests in (alone, many)]
    assert sent[1] - sent[0] < 63 * sent[0] / 2
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(Add(many)), type=ToEngine)
    engine.inbox.append(received)
    engine.step()
    assert [request.token_ids[:300] for request in engine.core.scheduler._requests.values()] == [prompt] * 64


def test_of_two_requests_with_one_name_that_arrive_at_once_the_second_is_refused() -> None:
    engine = Engine()
    sent: list[StepOutputs] = []
    engine.core._sink = sent.append  # type: ignore[assignment]
    (request,) = engine.input.prepare([5, 6], SamplingParams(max_tokens=2), "id", arrival_s=0.0).requests
    engine.inbox.append(Add([request, msgspec.structs.replace(request, prompt_token_ids=[7])]))
    engine.finish()
    told = [(output.finish_reason, len(output.new_token_ids)) for step in sent for output in step.outputs]
    assert sorted(told, key=str) == sorted([(FinishReason.ERROR, 0), (None, 1), (FinishReason.LENGTH, 1)], key=str)


def test_an_idle_engine_sends_nothing() -> None:
    engine = Engine()
    engine.core._sink = lambda message: pytest.fail(f"sent {message}")
    assert not engine.step()


def test_admin_operations_answer_between_steps() -> None:
    engine = Engine()
    engine.inbox += [Call(1, "echo", [3, "x"]), Call(2, "stats", []), Call(3, "no_such_thing", [])]
    engine.step()
    echo, stats, unknown = engine.replies
    assert echo.value == [3, "x"]
    assert isinstance(stats.value, StepStats)
    assert unknown.error is not None
    assert unknown.error[0] == "RequestError"


def test_the_states_of_all_blocks_are_told_on_request() -> None:
    engine = Engine()
    engine.ask([5, 4], max_tokens=4)
    engine.step()
    engine.inbox.append(Call(1, "block_states", []))
    engine.step()
    (reply,) = engine.replies
    (states,) = reply.value
    assert states.count("p") == 1
    assert len(states) == engine.core.scheduler.kv.num_blocks
    assert set(states) == {"p", "f"}


def test_stop_ends_the_loop() -> None:
    engine = Engine()
    engine.inbox.append(Stop())
    engine.step()
    assert engine.core.stopping


def test_frames_survive_the_way_between_processes() -> None:
    output = EngineOutput(
        request_id="r", new_token_ids=[1, 2], new_logprobs=[[(1, -0.5, 1)]], finish_reason=FinishReason.LENGTH
    )
    frame = StepOutputs([output], StepStats(step=3, kv_usage=0.5), ["r"])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=FromEngine) == frame


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryPlanError("too little"), MemoryPlanError),
        (PromptTooLongError("too long"), PromptTooLongError),
        (RequestError("bad", param="n"), RequestError),
        (ZeroDivisionError("oops"), EngineError),
    ],
)
def test_an_error_keeps_its_type_and_text_across_the_border(error: Exception, kind: type[Exception]) -> None:
    back = raised(reported(error))
    assert type(back) is kind
    assert str(error) in str(back)


def test_a_tiny_cache_that_preempts_gives_the_same_tokens() -> None:
    roomy, tight = Engine(), Engine(num_blocks=12)
    texts = []
    for engine in (roomy, tight):
        states = [engine.ask([token, token + 1, 4], "final", max_tokens=20) for token in range(5, 11)]
        engine.finish()
        texts.append([output.outputs[0].token_ids for state in states if (output := state.take())])
    assert len(texts[0]) == 6
    assert texts[0] == texts[1]
    assert tight.metrics.preemptions > 0

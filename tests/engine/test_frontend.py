"""The asyncio front over a real engine process: streams, cancellation, death and restart, draining."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

from pagemill.config import EngineConfig
from pagemill.engine.caller import CALLER, Caller
from pagemill.engine.frontend import AsyncLLM
from pagemill.engine.offline import LLM
from pagemill.engine.process import EngineProcess
from pagemill.errors import (
    ConfigError,
    EngineDeadError,
    ModelNotFoundError,
    PagemillError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    ShuttingDownError,
)
from pagemill.params import FinishReason, RequestOutput, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tiny_config: EngineConfig) -> AsyncIterator[AsyncLLM]:
    """One engine for the tests that leave it as they found it."""
    made = await AsyncLLM.start(tiny_config, max_num_queued_reqs=16)
    yield made
    assert made.metrics.num_open == 0
    await made.shutdown()


async def collect(engine: AsyncLLM, prompt: Any, params: SamplingParams, kind: str = "delta") -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, "r", output_kind=kind)]


async def until(condition: Any) -> None:
    """Wait for the engine to get there; the test's own time limit ends a wait that is in vain."""
    while not condition():  # noqa: ASYNC110  (polls another process)
        await asyncio.sleep(0.005)


async def test_streams_agree_with_offline_answers_and_with_each_other(
    engine: AsyncLLM, tiny_config: EngineConfig
) -> None:
    prompts = ["the fox", "over the lazy dog", "a while"]
    deltas = await asyncio.gather(*(collect(engine, prompt, PARAMS) for prompt in prompts))
    finals = await asyncio.gather(*(collect(engine, prompt, PARAMS, "final") for prompt in prompts))
    assert engine.health().alive
    assert engine.engine_pid not in {None, os.getpid()}
    assert await engine.call("check_invariants") is None
    with LLM.from_config(tiny_config) as llm:
        offline = llm.generate(prompts, PARAMS, use_tqdm=False)
    for streamed, final, expected in zip(deltas, finals, offline, strict=True):
        assert len(final) == 1
        assert "".join(output.outputs[0].text for output in streamed) == final[0].outputs[0].text
        assert final[0].outputs[0].text == expected.outputs[0].text
        assert final[0].outputs[0].token_ids == expected.outputs[0].token_ids


async def test_frames_that_no_socket_takes_at_once_pass_both_ways_beside_streams(engine: AsyncLLM) -> None:
    beside = asyncio.create_task(collect(engine, "the fox", LONG, "final"))
    name = "n" * 3_000_000
    with pytest.raises(PagemillError) as failed:
        await engine.call(name)
    assert name in str(failed.value)
    assert len((await beside)[0].outputs[0].token_ids) == LONG.max_tokens


async def test_a_reader_that_leaves_ends_its_request_and_no_other(engine: AsyncLLM) -> None:
    aborted = engine.metrics.finished(FinishReason.ABORT)
    other = asyncio.create_task(collect(engine, "the dog", LONG, "final"))
    async with aclosing(engine.generate("the fox", LONG, "gone")) as stream:
        await anext(stream)
    task = asyncio.create_task(collect(engine, "jumps", LONG))
    await until(lambda: engine.metrics.num_open == 2)
    task.cancel()
    await until(lambda: engine.metrics.num_open == 1)
    (output,) = await other
    assert len(output.outputs[0].token_ids) == 100
    assert engine.metrics.finished(FinishReason.ABORT) - aborted == 2
    stats = await engine.call("stats")
    assert stats[4] == stats[5] == 0


async def test_a_slow_reader_gets_what_is_missing_in_one_piece(engine: AsyncLLM) -> None:
    stream = await engine.submit("the fox", LONG, "slow")
    await until(lambda: engine.metrics.num_open == 0)
    (output,) = [output async for output in stream]
    assert len(output.outputs[0].token_ids) == 100


async def test_readers_that_vanish_at_any_point_leave_nothing_behind(engine: AsyncLLM) -> None:
    draw = random.Random(0)

    async def vanish(index: int) -> None:
        async with aclosing(engine.generate([5 + index, 6, 7], LONG, "v", output_kind="delta")) as stream:
            for _ in range(draw.randrange(4)):
                await anext(stream, None)  # on a busy machine all of it may be there at once

    for _ in range(4):
        await asyncio.gather(*(vanish(index) for index in range(16)))
    assert engine.metrics.num_open == 0
    assert await engine.call("check_invariants") is None
    stats = await engine.call("stats")
    assert stats[4:7] == [0, 0, 0.0]
    assert await collect(engine, "the fox", PARAMS)


async def test_bad_requests_are_refused_at_once_and_the_next_is_served(engine: AsyncLLM) -> None:
    with pytest.raises(PromptTooLongError, match="128"):
        await engine.submit([7] * 300, PARAMS, "r")
    with pytest.raises(RequestError, match="cannot be empty"):
        await engine.submit("", PARAMS, "r")
    with pytest.raises(QueueFullError, match="--max-num-queued-reqs"):
        await engine.submit("x", SamplingParams(n=17), "r")
    with pytest.raises(RequestError, match="priority=18446744073709551616"):
        await engine.submit("x", PARAMS, "r", priority=2**64)
    with pytest.raises(UnicodeEncodeError):
        await engine.submit("x", PARAMS, "a lone surrogate: \ud800")
    assert engine.metrics.num_open == 0
    assert await collect(engine, "the fox", PARAMS)


async def test_prompts_past_the_limit_of_queued_tokens_are_refused_but_never_a_lone_one(engine: AsyncLLM) -> None:
    engine.max_num_queued_tokens = 20
    try:
        first = await engine.submit([5] * 25, LONG, "first")
        with pytest.raises(QueueFullError, match="--max-num-queued-tokens") as refused:
            await engine.submit([6] * 5, PARAMS, "second")
        assert refused.value.retry_after_s >= 1
        assert engine.metrics.rejections["max_num_queued_tokens"] == 1
        await anext(first)
        assert (await collect(engine, [6] * 5, PARAMS, "final"))[0].finished
        first.close()
    finally:
        engine.max_num_queued_tokens = None
    await until(lambda: engine.metrics.num_open == 0)


async def test_prompts_that_come_together_are_taken_or_refused_together(engine: AsyncLLM) -> None:
    engine.max_num_queued_tokens = 20
    try:
        engine.check_room(100)  # nothing waits
        first = await engine.submit([5] * 16, LONG, "first", has_room=True)
        engine.check_room(4)
        with pytest.raises(QueueFullError, match="16 tokens wait and 5 more"):
            engine.check_room(5)
        more = await engine.submit([6] * 15, PARAMS, "more", has_room=True)  # of those that were asked about together
        more.close()
        first.close()
    finally:
        engine.max_num_queued_tokens = None
    await until(lambda: engine.metrics.num_open == 0)


async def test_different_tenants_find_nothing_of_each_other_in_the_cache(engine: AsyncLLM) -> None:
    async def cached(tenant: str) -> int:
        token = CALLER.set(Caller(tenant=tenant))
        try:
            return (await collect(engine, [9] * 60, PARAMS, "final"))[0].num_cached_tokens
        finally:
            CALLER.reset(token)

    assert [await cached(tenant) for tenant in ("a", "b", "a", "b", "")] == [0, 0, 48, 48, 0]


async def test_an_abort_by_name_ends_the_stream_with_what_it_has(engine: AsyncLLM) -> None:
    stream = await engine.submit("the fox", LONG, "mine")
    await anext(stream)
    assert await engine.abort("mine")
    last = [output async for output in stream][-1]
    assert last.finished
    assert last.outputs[0].finish_reason is FinishReason.ABORT
    assert not await engine.abort("mine")


async def test_a_killed_engine_ends_open_requests_at_once_and_comes_back(engine: AsyncLLM) -> None:
    before = await collect(engine, "the fox", PARAMS, "final")
    stream = await engine.submit("the dog", SamplingParams(max_tokens=100, ignore_eos=True), "open")
    await anext(stream)
    assert engine.engine_pid is not None
    os.kill(engine.engine_pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        [output async for output in stream]
    health = engine.health()
    assert not health.alive
    assert "SIGKILL" in (health.reason or "")
    with pytest.raises(EngineDeadError, match="try again"):
        await engine.submit("the dog", PARAMS, "too early")
    await until(lambda: engine.health().alive)
    after = await collect(engine, "the fox", PARAMS, "final")
    assert after[0].outputs[0].token_ids == before[0].outputs[0].token_ids
    assert engine.health().restarts == engine.metrics.restarts == 1
    assert engine.metrics.finished(FinishReason.ERROR) == 1


async def test_shutdown_lets_open_requests_finish_and_takes_no_new_ones(tiny_config: EngineConfig) -> None:
    engine = await AsyncLLM.start(tiny_config)
    pid = engine.engine_pid
    task = asyncio.create_task(collect(engine, "the fox", LONG, "final"))
    await until(lambda: engine.metrics.num_open == 1)
    ending = asyncio.create_task(engine.shutdown(timeout_s=60.0))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDownError):
        await engine.submit("x", PARAMS, "late")
    (output,) = await task
    assert output.outputs[0].finish_reason is FinishReason.LENGTH
    await ending
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_shutdown_without_patience_ends_what_is_open_with_an_error(tiny_config: EngineConfig) -> None:
    engine = await AsyncLLM.start(tiny_config)
    stream = await engine.submit("the fox", LONG, "r")
    await engine.shutdown()
    with pytest.raises(ShuttingDownError, match="before the request was done"):
        _ = [output async for output in stream]
    assert engine.metrics.finished(FinishReason.ABORT) == 1


async def test_what_keeps_the_engine_from_starting_is_raised_as_what_it_is(tiny_config: EngineConfig) -> None:
    from dataclasses import replace

    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        await AsyncLLM.start(replace(tiny_config, model="no-such-model"))
    with pytest.raises(ConfigError):
        await AsyncLLM.start(replace(tiny_config, num_gpu_blocks_override=None, kv_cache_memory_bytes=1))


async def test_a_child_that_dies_before_it_is_told_anything_is_an_error_not_a_hang(tiny_config: EngineConfig) -> None:
    process = EngineProcess.spawn()
    os.kill(process.pid, signal.SIGKILL)
    process.ended.result()
    with pytest.raises(EngineDeadError, match="while starting"):
        await AsyncLLM.start(tiny_config, process=process)

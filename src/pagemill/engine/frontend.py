"""The asyncio front of the engine: requests in, streams out, and an engine process that is kept alive.

Owns the engine process's life (start, death, restart, end) and what that means for open requests. Must not import
torch. Only this module's event loop touches the state of requests, so nothing is locked; prompts that take long to
tokenise do so in a thread.

When the engine process ends by itself: every open request ends with :class:`~pagemill.errors.EngineDeadError`, new ones
are refused with it, a new process is started (at once, then with growing pauses while it keeps failing), and requests
are taken again when it is ready.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagemill.config import EngineConfig, validate
from pagemill.engine.caller import CALLER, Caller
from pagemill.engine.client import ProcessClient
from pagemill.engine.detokenizer import Vocabulary
from pagemill.engine.input import InputProcessor, PreparedRequest, check_request
from pagemill.engine.metrics import Metrics
from pagemill.engine.output import OutputKind, OutputProcessor, RequestState
from pagemill.engine.pacing import Pacer
from pagemill.engine.pooling import PoolingPrompt
from pagemill.engine.process import EngineProcess
from pagemill.engine.record import RequestRecord
from pagemill.engine.stream import RequestStream
from pagemill.engine.wire import EngineFacts, StepOutputs
from pagemill.errors import EngineDeadError, PagemillError, QueueFullError, ShuttingDownError
from pagemill.model_config import ModelConfig, PoolingConfig
from pagemill.params import FinishReason, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from pagemill.engine.text import ModelText
    from pagemill.models.chat_template import ChatTemplate
    from pagemill.models.tokenizer import Tokenizer

__all__ = ["AsyncLLM", "EngineHealth"]

logger = logging.getLogger("pagemill.engine")

SHORT_PROMPT_CHARS = 4096
"""Prompts up to this length are tokenised on the event loop: a thread costs more."""
ADMITTED_A_TURN = 64
"""Sequences of one request that are queued before others get a turn (about a millisecond)."""
RESTART_PAUSES_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Before the first, second, ... start in a row; the last one repeats."""
HEALTHY_S = 60.0
"""An engine that lived this long is restarted without a pause."""
STUCK_S = 300.0
"""A step that takes longer than this is not busy but dead."""


@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    """Whether requests are served."""

    alive: bool
    heartbeat_age_s: float
    """Seconds since the engine's last step (or idle beat)."""
    restarts: int
    reason: str | None
    """Why it is not alive."""


class AsyncLLM:
    """An engine in a process of its own, for asyncio. Make one with :meth:`start`."""

    def __init__(
        self,
        config: EngineConfig,
        text: ModelText,
        *,
        max_num_queued_reqs: int,
        max_num_queued_tokens: int | None,
        log_level: str,
    ) -> None:
        self.config = config
        self.text = text
        self.max_num_queued_reqs = max_num_queued_reqs
        self.max_num_queued_tokens = max_num_queued_tokens
        self._log_level = log_level
        self._client: ProcessClient | None = None
        self._down_reason = "the engine is starting"
        self._closing = False
        self._idle = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self.pacer = Pacer(time.monotonic, asyncio.get_running_loop().call_later)
        self.facts: EngineFacts
        self.metrics: Metrics
        self._input: InputProcessor
        self._output: OutputProcessor

    @classmethod
    async def start(
        cls,
        config: EngineConfig | None = None,
        *,
        process: EngineProcess | None = None,
        max_num_queued_reqs: int = 2048,
        max_num_queued_tokens: int | None = None,
        log_level: str = "info",
    ) -> AsyncLLM:
        """Start the engine process and wait until it serves; raises what kept it from starting.

        ``process`` is a child spawned earlier, so that it imports while the caller does other things.
        """
        config = config or EngineConfig()
        validate(config)
        process = process or EngineProcess.spawn()
        try:
            source = await asyncio.to_thread(_resolve, config)
            # The front has found (and fetched) the model; the child is told the files, not the name.
            config = dataclasses.replace(config, model=str(source.path))
            received: list[StepOutputs] = []
            starting = asyncio.create_task(ProcessClient.start(process, config, received.append, log_level=log_level))
            try:
                text = await asyncio.to_thread(_open_text, source, config)
                engine = cls(
                    config,
                    text,
                    max_num_queued_reqs=max_num_queued_reqs,
                    max_num_queued_tokens=max_num_queued_tokens,
                    log_level=log_level,
                )
                client = await starting
            except BaseException:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                raise
        except BaseException:
            await asyncio.to_thread(process.discard)
            raise
        engine._begin(client)
        return engine

    def _begin(self, client: ProcessClient) -> None:
        self.metrics = Metrics(model_name=self.model_name, max_model_len=client.facts.max_model_len)
        self._output = OutputProcessor(Vocabulary(self.tokenizer), self.metrics)
        self._connect(client)
        self._input = InputProcessor(
            self.tokenizer, model_config=self.model_config, max_model_len=self.max_model_len, config=self.config
        )
        self._supervisor = asyncio.create_task(self._supervise(client))
        gc.freeze()  # what was made while loading stays; the collector would walk it in the middle of streams

    def _connect(self, client: ProcessClient) -> None:
        self.facts = client.facts
        client.on_outputs = self._on_outputs
        self.metrics.engine_started(self.config, block_size=self.facts.block_size, num_blocks=self.facts.num_blocks)
        self._client = client

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.text.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one."""
        return self.text.chat_template

    @property
    def model_name(self) -> str:
        """The model as the user named it."""
        return self.text.name

    @property
    def model_config(self) -> ModelConfig:
        """The model's sizes."""
        return self.facts.model_config

    @property
    def pooling(self) -> PoolingConfig | None:
        """How the model pools; None where it generates."""
        return self.model_config.pooling

    @property
    def embedding_size(self) -> int:
        """Values of a vector."""
        return self.model_config.hidden_size

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens."""
        return self.facts.max_model_len

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine; None while it is down."""
        return self._client.process.pid if self._client is not None else None

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        output_kind: str = "delta",
        add_special_tokens: bool = True,
        has_room: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request. Closing or cancelling the generator aborts it within a step.

        ``output_kind``: "delta" yields what is new, "cumulative" everything so far, "final" everything once.
        ``has_room``: :meth:`check_room` was asked for this prompt, and for those that come with it.
        """
        stream = await self.submit(
            prompt,
            params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            output_kind=output_kind,
            add_special_tokens=add_special_tokens,
            has_room=has_room,
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        output_kind: str = "delta",
        add_special_tokens: bool = True,
        has_room: bool = False,
    ) -> RequestStream:
        """Check a request and queue it; its errors are raised here, before anything is streamed."""
        arrival_s = time.monotonic()
        caller = CALLER.get()
        check_request(prompt, params)
        self._check_open(params.n)

        def prepare() -> PreparedRequest:
            return self._input.prepare(
                prompt,
                params,
                request_id,
                arrival_s=arrival_s,
                priority=priority,
                cache_salt=cache_salt,
                tenant=caller.tenant,
                add_special_tokens=add_special_tokens,
            )

        if len(prompt) > SHORT_PROMPT_CHARS or params.structured_outputs is not None:
            prepared = await asyncio.to_thread(prepare)
            self._check_open(params.n)
        else:
            prepared = prepare()
        if not has_room:
            self.check_room(len(prepared.prompt_token_ids))
        return self._admit(prepared, OutputKind(output_kind), arrival_s, caller)

    async def pool(
        self, prompts: Sequence[PoolingPrompt], request_id: str, *, priority: int = 0, cache_salt: str | None = None
    ) -> list[RequestOutput]:
        """The vectors of several inputs (``pooled``), in their order. Cancelling it aborts what still runs."""
        arrival_s = time.monotonic()
        self._check_open(len(prompts))
        caller = CALLER.get()

        def prepare() -> list[PreparedRequest]:
            return self._input.prepare_pooling(
                prompts, request_id, arrival_s=arrival_s, priority=priority, cache_salt=cache_salt, tenant=caller.tenant
            )

        long = sum(len(prompt.token_ids) for prompt in prompts) > SHORT_PROMPT_CHARS
        prepared = await asyncio.to_thread(prepare) if long else prepare()
        self.check_room(sum(len(each.prompt_token_ids) for each in prepared))
        streams: list[RequestStream] = []
        try:
            for index, each in enumerate(prepared):
                if index % ADMITTED_A_TURN == 0:  # a request may hold thousands; others get their turn between
                    await asyncio.sleep(0)
                    self._check_open(1)
                streams.append(self._admit(each, OutputKind.FINAL, arrival_s, caller))
            outputs = [await anext(stream) for stream in streams]
        finally:
            for stream in streams:
                stream.close()
        if any(output.pooled is None for output in outputs):
            raise ShuttingDownError("the request was ended before its vectors were computed; try again in a moment")
        return outputs

    def _check_open(self, num_new: int) -> None:
        if self._closing:
            raise ShuttingDownError("the server is shutting down and takes no new requests")
        if self._client is None:
            raise EngineDeadError(f"{self._down_reason}; it is started again, try again in a moment")
        held = self._output.num_open
        over = held + num_new - self.max_num_queued_reqs
        if over > 0:
            self.metrics.note_rejection("max_num_queued_reqs")
            raise QueueFullError(
                f"{held} requests are waiting or running and {num_new} more would pass the limit of"
                f" {self.max_num_queued_reqs} (--max-num-queued-reqs); try again in a moment",
                retry_after_s=self.metrics.retry_after_s(time.monotonic(), completions=over),
            )

    def check_room(self, num_new: int) -> None:
        """Whether prompts of so many tokens, of one caller, may join the queue: all of them or none.

        Raises QueueFullError. Where no prompt waits they are taken however long they are: else they would never be.
        """
        queued = self._output.num_queued_tokens
        if self.max_num_queued_tokens is None or not queued or queued + num_new <= self.max_num_queued_tokens:
            return
        self.metrics.note_rejection("max_num_queued_tokens")
        raise QueueFullError(
            f"prompts of {queued} tokens wait and {num_new} more would pass the limit of {self.max_num_queued_tokens}"
            " (--max-num-queued-tokens); try again in a moment, or with a shorter prompt",
            retry_after_s=self.metrics.retry_after_s(
                time.monotonic(), prompt_tokens=min(queued, queued + num_new - self.max_num_queued_tokens)
            ),
        )

    def _admit(self, prepared: PreparedRequest, kind: OutputKind, arrival_s: float, caller: Caller) -> RequestStream:
        stream = RequestStream(self)
        stream.state = RequestState(
            prepared,
            kind=kind,
            arrival_s=arrival_s,
            vocabulary=self._output.vocabulary,
            on_change=stream.note,
            caller=caller,
        )
        assert self._client is not None
        self._output.add(stream.state)
        if prepared.needs_engine:
            try:
                self._client.add(prepared.requests)
            except EngineDeadError as error:
                self._output.fail(stream.state, error, time.monotonic())
            except BaseException:
                self._output.abort(stream.state, time.monotonic())  # what was never sent must not count as waiting
                raise
        else:
            self._output.abort(stream.state, time.monotonic(), FinishReason.LENGTH)
        return stream

    def drop(self, state: RequestState) -> None:
        """Nobody reads this request any more: stop it if it runs."""
        if not state.finished:
            self._tell_aborted(self._output.abort(state, time.monotonic()))
            self._note_idle()

    async def abort(self, request_id: str) -> bool:
        """End every open request that its caller named so, with what it has; False if there is none."""
        found = [state for state in self._output.requests if state.request_id == request_id]
        for state in found:
            self._tell_aborted(self._output.abort(state, time.monotonic()))
            state.on_change()
        self._note_idle()
        return bool(found)

    async def call(self, name: str, *args: Any) -> Any:
        """An admin operation of the engine."""
        if self._client is None:
            raise EngineDeadError(f"{self._down_reason}; try again in a moment")
        return await self._client.call(name, *args)

    def observe(self, observer: Callable[[RequestRecord], None], *, content: bool = False) -> None:
        """Tell ``observer`` of every request that ends; with ``content``, of its text too."""
        self._output.observers.append(observer)
        self._output.keeps_content |= content

    def health(self) -> EngineHealth:
        """Whether requests are served, answered without asking the engine: busy is not dead."""
        client = self._client
        age_s = client.heartbeat_age_s if client is not None else 0.0
        reason: str | None = None
        if client is None or client.process.ended.done():
            reason = self._down_reason
        elif age_s > STUCK_S:
            reason = f"the engine has not finished a step for {age_s:.0f} s"
        return EngineHealth(alive=reason is None, heartbeat_age_s=age_s, restarts=self.metrics.restarts, reason=reason)

    async def shutdown(self, timeout_s: float = 0.0) -> None:
        """Take no more requests, let open ones finish for ``timeout_s`` seconds, cut off the rest, end the engine.

        What is cut off ends with :class:`~pagemill.errors.ShuttingDownError`: half an answer must not pass for a whole.
        """
        self._closing = True
        if self._output.num_open and timeout_s > 0:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                logger.warning("%d requests are aborted after %g s", self._output.num_open, timeout_s)
        for state in self._output.requests:
            state.error = ShuttingDownError(
                "the server shut down before the request was done; send it again, or elsewhere"
            )
            self._tell_aborted(self._output.abort(state, time.monotonic()))
            state.on_change()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._client is not None:
            await self._client.shutdown()
        self._client, self._down_reason = None, "the engine was shut down"

    def _on_outputs(self, step: StepOutputs) -> None:
        self._tell_aborted(self._output.process(step))
        self.pacer.pace()
        self._note_idle()

    def _note_idle(self) -> None:
        if self._closing and not self._output.num_open:
            self._idle.set()

    def _tell_aborted(self, request_ids: list[str]) -> None:
        if request_ids and self._client is not None:
            try:
                self._client.abort(request_ids)
            except EngineDeadError:
                logger.debug("the engine died before it could be told of an abort")

    async def _supervise(self, client: ProcessClient) -> None:
        """Start the engine again whenever it ends by itself."""
        failures = 0
        while True:
            started_s = time.monotonic()
            self._down(await asyncio.shield(client.dead))
            died_s = time.monotonic()
            failures = 0 if died_s - started_s > HEALTHY_S else failures
            while True:
                await asyncio.sleep(RESTART_PAUSES_S[min(failures, len(RESTART_PAUSES_S) - 1)])
                failures += 1
                try:
                    client = await ProcessClient.start(
                        EngineProcess.spawn(), self.config, self._on_outputs, log_level=self._log_level
                    )
                    break
                except PagemillError as error:
                    self._down_reason = f"the engine cannot be started again: {error}"
                    logger.error("%s", self._down_reason)
            self._connect(client)
            self.metrics.restarts += 1
            logger.warning("the engine serves again after %.1f s", time.monotonic() - died_s)

    def _down(self, reason: str) -> None:
        logger.error("%s; %d completions were open; starting it again", reason, self._output.num_open)
        self._client, self._down_reason = None, reason
        self.metrics.engine_died()
        for state in self._output.requests:
            self._output.fail(state, EngineDeadError(f"{reason}; try again in a moment"), time.monotonic())
        self._note_idle()


def _resolve(config: EngineConfig) -> Any:
    from pagemill.models.sources import resolve_source

    return resolve_source(config.model, revision=config.revision)


def _open_text(source: Any, config: EngineConfig) -> ModelText:
    from pagemill.engine.text import ModelText

    return ModelText.open(source, config)

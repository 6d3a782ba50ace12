"""A whole engine in one thread: input, core with a fake model, output. Steps are taken by hand."""

from __future__ import annotations

import itertools
from typing import Any

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.detokenizer import Vocabulary
from pagemill.engine.input import InputProcessor
from pagemill.engine.metrics import Metrics
from pagemill.engine.output import OutputKind, OutputProcessor, RequestState
from pagemill.engine.wire import Abort, Add, CallReply, StepOutputs, ToEngine
from pagemill.models.tokenizer import Tokenizer
from pagemill.params import RequestOutput, SamplingParams
from tests.engine.fakes import FakeExecutor, NextToken, byte_level_tokenizer, scramble


class Engine:
    """``ask`` puts a request in, ``step`` takes one step, ``finish`` all that are left."""

    def __init__(
        self,
        next_token: NextToken = scramble,
        *,
        tokenizer: Tokenizer | None = None,
        num_blocks: int = 64,
        max_model_len: int = 256,
        clamp: bool = False,
        **fields: Any,
    ) -> None:
        config = EngineConfig(**fields)
        self.tokenizer = tokenizer or byte_level_tokenizer()
        self.executor = FakeExecutor(next_token, num_blocks=num_blocks, max_model_len=max_model_len)
        self.metrics = Metrics(model_name="fake", max_model_len=max_model_len)
        self.output = OutputProcessor(Vocabulary(self.tokenizer), self.metrics)
        self.input = InputProcessor(
            self.tokenizer,
            model_config=self.executor.model_config,
            max_model_len=max_model_len,
            config=config,
            clamp=clamp,
        )
        self.inbox: list[ToEngine] = []
        self.replies: list[CallReply] = []
        self.now_s = 100.0
        self.core = EngineCore.create(config, self.executor, inbox=self._take, sink=self._receive)
        self.core._clock = self._tick
        self._ids = itertools.count()

    def ask(self, prompt: str | list[int], kind: str = "delta", request_id: str = "", **params: Any) -> RequestState:
        """Queue a request with these sampling parameters."""
        prepared = self.input.prepare(
            prompt, SamplingParams.create(**params), request_id or f"r{next(self._ids)}", arrival_s=self.now_s
        )
        state = RequestState(
            prepared,
            kind=OutputKind(kind),
            arrival_s=self.now_s,
            vocabulary=self.output.vocabulary,
            on_change=lambda: None,
        )
        self.output.add(state)
        self.inbox.append(Add(prepared.requests))
        return state

    def abort(self, state: RequestState) -> None:
        """The reader of this request is gone."""
        self.inbox.append(Abort(self.output.abort(state, self.now_s)))

    def step(self) -> bool:
        """One step, its outputs handed on."""
        return self.core.step()

    def finish(self) -> None:
        """Steps until nothing is left, with every invariant of the core checked."""
        while self.step():
            self.core.scheduler.check_invariants()

    def stream(self, state: RequestState) -> list[RequestOutput]:
        """All that this request yields when it is read after each step."""
        outputs = []
        while not state.finished:
            self.step()
            output = state.take()
            if output is not None:
                outputs.append(output)
        return outputs

    def _take(self) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        return messages

    def _receive(self, message: StepOutputs | CallReply) -> None:
        if isinstance(message, CallReply):
            self.replies.append(message)
            return
        stopped = self.output.process(message)
        if stopped:
            self.inbox.append(Abort(stopped))

    def _tick(self) -> float:
        self.now_s += 0.01
        return self.now_s

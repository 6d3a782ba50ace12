"""The offline front: prompts in, finished outputs back, with the engine in this process.

Owns the loop that drives the core until the work is done, and the progress bar. Everything runs in the caller's thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from os import PathLike, fspath
from typing import Any, Self, TypeVar

from pagemill.config import DEFAULT_MODEL, EngineConfig, validate
from pagemill.engine.beam_search import BeamSearch, step_params
from pagemill.engine.client import InprocClient
from pagemill.engine.detokenizer import Vocabulary
from pagemill.engine.input import InputProcessor, PreparedRequest
from pagemill.engine.metrics import Metrics, RunStats
from pagemill.engine.output import OutputKind, OutputProcessor, RequestState
from pagemill.engine.pooling import Comparison, PoolingPrompt, PoolingTexts, check_embeds, check_generates, embedding
from pagemill.engine.text import ModelText
from pagemill.engine.wire import StepOutputs
from pagemill.errors import ConfigError, EngineDeadError, PagemillError, RequestError, did_you_mean
from pagemill.models.sources import resolve_source
from pagemill.models.tokenizer import Tokenizer
from pagemill.params import (
    BeamSearchParams,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    FinishReason,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    ScoringOutput,
    ScoringRequestOutput,
)

__all__ = ["LLM", "Prompt"]

Prompt = str | Sequence[int] | dict[str, Any]
"""Text, token ids, or vLLM's ``{"prompt": text}`` and ``{"prompt_token_ids": ids}``."""
Message = dict[str, Any]
Key = TypeVar("Key")
_Split = tuple[str | Sequence[int], bool]
"""The prompt proper, and whether text gets the tokenizer's special tokens."""


class LLM:
    """A model in this process, for offline work.

    ``model`` is a folder, a .gguf file, a hub id or the embedded default; the other fields are
    :class:`~pagemill.config.EngineConfig`'s. Not for several threads at once.
    """

    def __init__(self, model: str | PathLike[str] = DEFAULT_MODEL, **fields: Any) -> None:
        known = [field.name for field in dataclasses.fields(EngineConfig)]
        for name in fields:
            if name not in known:
                raise ConfigError(f"unknown engine option {name!r}{did_you_mean(name, known)}")
        self._open(EngineConfig(model=fspath(model), **fields))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """An engine for a whole config."""
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    def _open(self, config: EngineConfig) -> None:
        validate(config)
        source = resolve_source(config.model, revision=config.revision)
        self.config = dataclasses.replace(config, model=str(source.path), max_stall_ms=0.0)
        self.text = ModelText.open(source, self.config)
        self._client = InprocClient(self.config, self._on_outputs)
        facts = self._client.facts
        self.model_config = facts.model_config
        self.max_model_len = facts.max_model_len
        self.metrics = Metrics(model_name=source.name, max_model_len=facts.max_model_len)
        self.metrics.engine_started(config, block_size=facts.block_size, num_blocks=facts.num_blocks)
        self._output = OutputProcessor(Vocabulary(self.text.tokenizer), self.metrics)
        self._input = InputProcessor(
            self.text.tokenizer,
            model_config=facts.model_config,
            max_model_len=facts.max_model_len,
            config=self.config,
            clamp=True,
        )
        self._ids = itertools.count()
        self._failure: str | None = None
        """What a step raised; the core is between two states then."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.text.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, under vLLM's name."""
        return self.text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters as the model's authors recommend them."""
        return self.text.default_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; results in the prompts' order.

        ``sampling_params`` is one for all, or one per prompt. A prompt that cannot be served raises
        :class:`~pagemill.errors.RequestError` before anything runs; one that fails while it runs ends with
        ``finish_reason="error"``, and the others finish.
        """
        split = [self._split(item) for item in _as_list(prompts)]
        return self._run(split, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several."""
        check_generates(self.model_config.pooling)
        if not isinstance(messages, list | tuple):
            raise RequestError(
                f"messages is of type {type(messages).__name__}; it must be a list of messages, such as"
                " [{'role': 'user', 'content': 'Hi'}], or a list of such lists",
                param="messages",
            )
        conversations: list[Any] = [messages] if not messages or isinstance(messages[0], dict) else list(messages)
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        rendered: list[_Split] = [(self.text.render_chat(list(each), **options), False) for each in conversations]
        return self._run(rendered, sampling_params, use_tqdm, None)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[RequestOutput]:
        """The most probable continuations of each prompt, best first; see :mod:`pagemill.engine.beam_search`."""
        ending_ids = self._input.eos_token_ids
        one = step_params(params, ending_ids, self.config.max_logprobs)
        prepared = [self._prepare(*self._split(prompt), one, 0) for prompt in _as_list(prompts)]
        searches = [
            BeamSearch(each.prompt_token_ids, params, self.max_model_len - len(each.prompt_token_ids), ending_ids)
            for each in prepared
        ]
        while any(steps := [search.prompts() for search in searches]):
            outputs = iter(self._run([(prompt, False) for step in steps for prompt in step], one, False, None))
            for search, step in zip(searches, steps, strict=True):
                if step:
                    search.advance(list(itertools.islice(outputs, len(step))))
        vocabulary = self._output.vocabulary
        return [
            search.output(each.request_id, each.prompt, vocabulary)
            for search, each in zip(searches, prepared, strict=True)
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, in their order. Raises :class:`~pagemill.errors.RequestError` for a bad one."""
        params = pooling_params or PoolingParams(truncate_prompt_tokens=truncate_prompt_tokens)
        pooling = check_embeds(self.model_config.pooling, params, self.model_config.hidden_size)
        given = [self._split(item)[0] for item in _as_list(prompts)]
        inputs = PoolingTexts(self.tokenizer, self.max_model_len).inputs(given, params)
        return [
            EmbeddingRequestOutput(
                request_id=output.request_id,
                prompt_token_ids=output.prompt_token_ids,
                outputs=EmbeddingOutput(embedding(output, pooling, params).tolist()),
                num_cached_tokens=output.num_cached_tokens,
            )
            for output in self._pool(inputs, use_tqdm)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        use_activation: bool = True,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one with many, or as many with as many. See docs/embeddings.md."""
        first, second = ([each] if isinstance(each, str) else list(each) for each in (data_1, data_2))
        compared = Comparison(self.model_config.pooling, first, second, ("data_1", "data_2"))
        params = PoolingParams(truncate_prompt_tokens=truncate_prompt_tokens)
        inputs = compared.inputs(PoolingTexts(self.tokenizer, self.max_model_len), params)
        outputs = self._pool(inputs, use_tqdm)
        scores = compared.scores(outputs, activate=use_activation)
        return [
            ScoringRequestOutput(
                request_id=output.request_id, prompt_token_ids=output.prompt_token_ids, outputs=ScoringOutput(value)
            )
            for output, value in zip(outputs[-len(scores) :], scores, strict=True)
        ]

    def _pool(self, inputs: Sequence[PoolingPrompt], use_tqdm: bool) -> list[RequestOutput]:
        prepared = self._input.prepare_pooling(inputs, str(next(self._ids)), arrival_s=time.monotonic())
        states = [self._admit(each) for each in prepared]
        outputs = self._finish(states, use_tqdm)
        for state in states:
            if state.error is not None:
                raise state.error
        return outputs

    def complete(
        self, items: Iterable[tuple[Key, Prompt, SamplingParams]], *, ahead: int | None = None
    ) -> Iterator[tuple[Key, RequestOutput | PagemillError]]:
        """Complete a stream of prompts, each named by a key; yields them as they finish, bad ones as their error.

        Takes ``ahead`` items more than run at once, so a file of any length can be worked through.
        """
        limit = self.config.max_num_seqs + (self.config.max_num_seqs if ahead is None else ahead)
        source = iter(items)
        ready: deque[tuple[Key, RequestOutput | PagemillError]] = deque()
        states: dict[int, tuple[Key, RequestState]] = {}
        more = True
        try:
            while more or states:
                while more and len(states) < limit:
                    try:
                        key, prompt, params = next(source)
                    except StopIteration:
                        more = False
                        break
                    try:
                        text, special = self._split(prompt)
                        state = self._admit(self._prepare(text, special, params, 0))
                    except RequestError as error:
                        ready.append((key, error))
                        continue
                    states[id(state)] = key, state
                self._step()
                for key, state in [entry for entry in states.values() if entry[1].finished]:
                    del states[id(state)]
                    ready.append((key, state.error or _taken(state)))
                while ready:
                    yield ready.popleft()
        finally:
            for _, state in states.values():
                self._drop(state)

    def stream(
        self, prompt: Prompt, params: SamplingParams, *, add_special_tokens: bool = True
    ) -> Generator[RequestOutput, None, None]:
        """One prompt's outputs as they come, each with what is new. Closing the iterator ends the request."""
        text, special = self._split(prompt)
        prepared = self._prepare(text, special and add_special_tokens, params, 0)
        state = self._admit(prepared, OutputKind.DELTA)
        try:
            while True:
                if state.error is not None:
                    raise state.error
                output = state.take()
                if output is not None:
                    yield output
                    if output.finished:
                        return
                else:
                    self._step()
        finally:
            self._drop(state)

    def token_times(self, prompt: Prompt, params: SamplingParams) -> list[float]:
        """Seconds from asking to each output token of one prompt."""
        start_s = time.monotonic()
        times: list[float] = []
        for output in self.stream(prompt, params):
            times += [time.monotonic() - start_s] * len(output.outputs[0].token_ids)
        return times

    def stats(self) -> RunStats:
        """Totals since the start; the difference of two says what happened between."""
        return self.metrics.totals()

    def call(self, name: str, *args: Any) -> Any:
        """An admin operation of the engine."""
        return self._client.call(name, *args)

    def shutdown(self) -> None:
        """Free the model's memory."""
        self._client.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _run(
        self,
        prompts: list[_Split],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = self._params_for(len(prompts), sampling_params)
        priorities = [0] * len(prompts) if priority is None else list(priority)
        if len(priorities) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(priorities)} priorities; give one per prompt")
        prepared = []
        for index, (prompt, special) in enumerate(prompts):
            try:
                prepared.append(self._prepare(prompt, special, params[index], priorities[index]))
            except RequestError as error:
                if len(prompts) > 1:
                    error.args = (f"prompt {index}: {error}",)
                raise
        return self._finish([self._admit(each) for each in prepared], use_tqdm)

    def _finish(self, states: list[RequestState], use_tqdm: bool) -> list[RequestOutput]:
        """Steps until all have ended, and what they gave."""
        try:
            self._drive(states, use_tqdm)
        finally:
            for state in states:
                self._drop(state)
        return [_taken(state) for state in states]

    def _drive(self, states: list[RequestState], use_tqdm: bool) -> None:
        unfinished = {id(state): state for state in states}
        bar: AbstractContextManager[Any] = nullcontext()
        if use_tqdm:
            from pagemill.engine.progress import RequestProgress

            bar = RequestProgress(len(states), self.metrics)
        with bar as progress:
            while unfinished:
                self._step()
                done = [key for key, state in unfinished.items() if state.finished]
                for key in done:
                    del unfinished[key]
                if progress is not None:
                    progress.update(len(states) - len(unfinished))

    def _params_for(self, count: int, given: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if not isinstance(given, list | tuple):
            only: Any = given  # whatever it is, the input checks it
            return [only] * count
        if len(given) != count:
            raise RequestError(
                f"{count} prompts but {len(given)} sampling_params; give one for all or one per prompt",
                param="sampling_params",
            )
        return list(given)

    def _split(self, prompt: Prompt) -> _Split:
        """The prompt proper, and whether text gets the tokenizer's special tokens."""
        if isinstance(prompt, dict):
            for name in ("prompt_token_ids", "prompt"):
                if prompt.get(name) is not None:
                    return prompt[name], bool(prompt.get("add_special_tokens", True))
            raise RequestError(f"a prompt given as a dict needs 'prompt' or 'prompt_token_ids'; got {sorted(prompt)}")
        return prompt, True

    def _prepare(
        self, prompt: str | Sequence[int], special: bool, params: SamplingParams, priority: int
    ) -> PreparedRequest:
        return self._input.prepare(
            prompt,
            params,
            str(next(self._ids)),
            arrival_s=time.monotonic(),
            priority=priority,
            add_special_tokens=special,
        )

    def _admit(self, prepared: PreparedRequest, kind: OutputKind = OutputKind.FINAL) -> RequestState:
        arrival_s = prepared.requests[0].arrival_time_s
        state = RequestState(
            prepared, kind=kind, arrival_s=arrival_s, vocabulary=self._output.vocabulary, on_change=_nothing
        )
        self._output.add(state)
        if prepared.needs_engine:
            self._client.add(prepared.requests)
        else:
            self._output.abort(state, time.monotonic(), FinishReason.LENGTH)
        return state

    def _drop(self, state: RequestState) -> None:
        if not state.finished:
            self._client.abort(self._output.abort(state, time.monotonic()))
            if self._failure is None:
                self._step()

    def _step(self) -> None:
        """One step; Ctrl-C takes effect after it, so that the engine is whole and can be used again."""
        if self._failure is not None:
            raise EngineDeadError(f"the engine failed before ({self._failure}); make a new LLM")
        with _interrupts_held():
            try:
                self._client.step()
            except Exception as error:
                self._failure = f"{type(error).__name__}: {error}"
                raise

    def _on_outputs(self, step: StepOutputs) -> None:
        stopped = self._output.process(step)
        if stopped:
            self._client.abort(stopped)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block and not within it."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not _in_main_thread():
        yield
        return
    caught: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if caught:
        raise KeyboardInterrupt


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _nothing() -> None:
    """Nobody is woken: the caller drives the steps itself."""


def _taken(state: RequestState) -> RequestOutput:
    output = state.take()
    assert output is not None, "a finished request has an output"
    return output


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt becomes a list of one; a list of ids is one prompt, and so is what is no prompt at all."""
    if isinstance(prompts, str | dict) or not isinstance(prompts, Sequence):
        return [prompts]
    if len(prompts) > 0 and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]

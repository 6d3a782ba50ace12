"""What the caller asks for, as the engine takes it: text to ids, every limit checked, n completions fanned out.

Owns the checks that need the tokenizer or the model's sizes (bounds that need neither are in params.py). Must not do
I/O or know asyncio. Nothing is ever cut without ``truncate_prompt_tokens``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import msgspec

from pagemill.config import EngineConfig
from pagemill.core.messages import EngineRequest
from pagemill.engine.grammar_compiler import compile_grammar
from pagemill.engine.pooling import PoolingPrompt, check_generates, check_pools
from pagemill.errors import PromptTooLongError, RequestError
from pagemill.model_config import ModelConfig
from pagemill.params import SamplingParams, StructuredOutputsParams

__all__ = ["InputProcessor", "PreparedRequest", "TextTokens", "check_request"]

_SEED_MASK = 2**64 - 1
MAX_PRIORITY = 2**31 - 1
KEPT_BAD_WORDS = 16
"""Lists of bad words whose ids are kept: the prompts of one request come one after another with the same list."""
NO_OUTPUT = SamplingParams(max_tokens=0, detokenize=False)
"""Of a request that wants a vector."""


class TextTokens(Protocol):
    """The part of a tokenizer that turning text into ids needs."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are not text."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The same for many texts."""

    def token_to_id(self, token: str) -> int | None:
        """The id of exactly this token."""


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """A request that passed every check."""

    request_id: str
    """The caller's name for it."""
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    """With ``max_tokens`` resolved."""
    requests: list[EngineRequest]
    """One per completion. The first alone carries the prompt: a long one is sent once, however many there are."""
    stop_by_id: dict[int, str]
    """Stop strings that are one special token each, which the engine can stop at by id."""

    @property
    def needs_engine(self) -> bool:
        """False where nothing is to be computed: no output, no figures of the prompt and no vector are wanted."""
        pools = self.requests[0].pooling != "none"
        return pools or self.params.max_tokens != 0 or self.params.prompt_logprobs is not None


def check_request(prompt: object, params: object) -> None:
    """Raise :class:`RequestError` unless these are what their names say; their values are another matter."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise RequestError(
            f"the prompt is of type {type(prompt).__name__}; it must be text, a list of token ids, or a dict with"
            " 'prompt' or 'prompt_token_ids'",
            param="prompt",
        )
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"sampling_params is of type {type(params).__name__}; it must be SamplingParams, such as"
            " SamplingParams(max_tokens=20)",
            param="sampling_params",
        )


class InputProcessor:
    """Turns prompts into requests for one model.

    With ``clamp`` an output that would not fit the context is shortened (and ends with ``length``), as offline use
    expects; without it the request is refused.
    """

    def __init__(
        self,
        tokenizer: TextTokens,
        *,
        model_config: ModelConfig,
        max_model_len: int,
        config: EngineConfig,
        clamp: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = model_config.vocab_size
        self.pooling = model_config.pooling
        self.has_segments = model_config.type_vocab_size > 1
        self.max_logprobs = config.max_logprobs
        self.eos_token_ids = tuple(sorted({*tokenizer.eos_ids, *model_config.eos_token_ids}))
        self._clamp = clamp
        self._policy = config.scheduling_policy
        self._random = random.Random(config.seed)
        self._bad_words_ids = lru_cache(KEPT_BAD_WORDS)(self._encode_bad_words)

    def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        arrival_s: float,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str = "",
        add_special_tokens: bool = True,
    ) -> PreparedRequest:
        """Check a request and make the engine's requests of it; :class:`RequestError` says what is wrong."""
        check_generates(self.pooling)
        check_request(prompt, params)
        params.verify()
        self._check_priority(priority)
        text = prompt if isinstance(prompt, str) else None
        params = self._constrained(params)
        prompt_token_ids = self._prompt_token_ids(prompt, params, add_special_tokens=add_special_tokens)
        self._check_token_ids(params)
        max_tokens = self._max_tokens(len(prompt_token_ids), params)
        params = msgspec.structs.replace(params, max_tokens=max_tokens)
        stop_by_id = self._stop_by_id(params)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        bad_words = self._bad_words_ids(params.bad_words) if params.bad_words else []
        unique = os.urandom(4).hex()
        requests = []
        for index in range(params.n):
            child = msgspec.structs.replace(
                params,
                n=1,
                stop_token_ids=(*params.stop_token_ids, *stop_by_id),
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            )
            requests.append(
                EngineRequest(
                    request_id=f"{request_id}-{unique}" + (f"-{index}" if params.n > 1 else ""),
                    prompt_token_ids=[] if index else prompt_token_ids,
                    params=child,
                    max_tokens=max_tokens,
                    arrival_time_s=arrival_s,
                    eos_token_ids=self.eos_token_ids,
                    priority=priority,
                    cache_salt=cache_salt,
                    tenant=tenant,
                    bad_words_token_ids=bad_words,
                    seed=(seed + index) & _SEED_MASK,
                )
            )
        return PreparedRequest(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=prompt_token_ids,
            params=params,
            requests=requests,
            stop_by_id=stop_by_id,
        )

    def prepare_pooling(
        self,
        prompts: Sequence[PoolingPrompt],
        request_id: str,
        *,
        arrival_s: float,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str = "",
    ) -> list[PreparedRequest]:
        """The same for inputs of which vectors are wanted: one request for each."""
        pooling = check_pools(self.pooling)
        self._check_priority(priority)
        prepared = []
        for index, prompt in enumerate(prompts):
            try:
                self._check_input(prompt.token_ids)
            except RequestError as error:
                if len(prompts) > 1:
                    error.args = (f"input {index}: {error}",)
                raise
            request = EngineRequest(
                request_id=f"{request_id}-{os.urandom(4).hex()}-{index}",
                prompt_token_ids=prompt.token_ids,
                params=NO_OUTPUT,
                max_tokens=0,
                arrival_time_s=arrival_s,
                priority=priority,
                cache_salt=cache_salt,
                tenant=tenant,
                pooling="last" if pooling.kind == "last" else "all",
                second_segment=prompt.second_segment if self.has_segments else None,
            )
            prepared.append(
                PreparedRequest(
                    request_id=request_id,
                    prompt=None,
                    prompt_token_ids=prompt.token_ids,
                    params=NO_OUTPUT,
                    requests=[request],
                    stop_by_id={},
                )
            )
        return prepared

    def _check_input(self, token_ids: list[int]) -> None:
        self._check_prompt_ids(token_ids, "input")
        if len(token_ids) > self.max_model_len:
            raise PromptTooLongError(
                f"the input has {len(token_ids)} tokens and this model takes {self.max_model_len}; shorten it, or set"
                " truncate_prompt_tokens (-1: as many as fit)",
                param="input",
            )

    def _prompt_token_ids(
        self, prompt: str | Sequence[int], params: SamplingParams, *, add_special_tokens: bool
    ) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if prompt else []
        else:
            if params.truncate_prompt_tokens is None and len(prompt) > self.max_model_len:
                self._max_tokens(len(prompt), params)  # too long whatever they are; raises
            token_ids = self._cut(list(prompt), params)
            self._check_prompt_ids(token_ids, "prompt")
        if not token_ids:
            raise RequestError("the prompt cannot be empty; send at least one character or token id", param="prompt")
        return self._cut(token_ids, params)

    def _cut(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """What ``truncate_prompt_tokens`` leaves."""
        most = params.truncate_prompt_tokens
        if most == -1:
            most = max(1, self.max_model_len - (1 if params.max_tokens is None else params.max_tokens))
        if most is None or len(token_ids) <= most:
            return token_ids
        return token_ids[:most] if params.truncation_side == "right" else token_ids[-most:]

    def _check_prompt_ids(self, token_ids: list[int], name: str) -> None:
        for token_id in token_ids:
            if type(token_id) is not int:
                raise RequestError(f"the {name} holds {token_id!r}; token ids are integers", param=name)
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"the {name} holds token id {token_id}; this model's ids are 0 to {self.vocab_size - 1}", param=name
                )

    def _check_token_ids(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            for token_id in getattr(params, name) or ():
                if token_id >= self.vocab_size:
                    raise RequestError(
                        f"{name} holds token id {token_id}; this model's ids are 0 to {self.vocab_size - 1}", param=name
                    )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.max_logprobs:
                raise RequestError(
                    f"{name}={value} is more than this engine gives, {self.max_logprobs} (--max-logprobs)", param=name
                )

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """The output's limit in tokens, within what the prompt leaves of the context."""
        limit, wanted = self.max_model_len, params.max_tokens
        room = limit - num_prompt_tokens
        if room < (0 if wanted == 0 else 1):
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens and this model's context is {limit} tokens, of which the"
                " output needs at least 1; shorten the prompt or set truncate_prompt_tokens",
                param="prompt",
            )
        if wanted is None:
            return room
        if wanted > room and not self._clamp:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens={wanted}, together"
                f" {num_prompt_tokens + wanted}; this model's context is {limit} tokens; ask for at most {room}",
                param="max_tokens",
            )
        return min(wanted, room)

    def _constrained(self, params: SamplingParams) -> SamplingParams:
        """With the grammar compiled; where it can go on no further the output ends, whatever else was asked for."""
        if params.structured_outputs is None:
            return params
        if not self.eos_token_ids:
            raise RequestError(
                "structured outputs need an end-of-text token, and this model's tokenizer names none",
                param="structured_outputs",
            )
        grammar = compile_grammar(params.structured_outputs)
        structured = StructuredOutputsParams(llguidance=grammar, min_tokens=params.min_tokens)
        return msgspec.structs.replace(params, structured_outputs=structured, min_tokens=0, ignore_eos=False)

    def _stop_by_id(self, params: SamplingParams) -> dict[int, str]:
        """Stop strings that are one special token: skipped in the text, they would never be seen there."""
        found = {}
        for stop in params.stop:
            token_id = self.tokenizer.token_to_id(stop)
            if token_id is not None and token_id in self.tokenizer.special_ids:
                found[token_id] = stop
        return found

    def _encode_bad_words(self, words: tuple[str, ...]) -> list[list[int]]:
        """Each word's ids at the start of a text and after a space. The list is shared by all who ask for it."""
        texts = []
        for word in words:
            bare = word.lstrip()
            texts += [bare, " " + bare] if bare else [word]
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [list(ids) for ids in dict.fromkeys(map(tuple, encoded)) if ids]

    def _check_priority(self, priority: int) -> None:
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise RequestError(
                f"priority={priority} is out of range; it must be between {-MAX_PRIORITY} and {MAX_PRIORITY}",
                param="priority",
            )
        if priority and self._policy != "priority":
            raise RequestError(
                f"priority={priority} would change nothing: requests are served by --scheduling-policy {self._policy};"
                " start with --scheduling-policy priority, or leave priority out",
                param="priority",
            )

"""What a caller asks for and what it gets back: the value types of the public API.

Owns the meaning and the bounds of every sampling parameter (vLLM's names). Must not import torch: these types cross
process boundaries and are read by the pure core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Self

import msgspec

from pagemill.errors import RequestError, did_you_mean
from pagemill.param_types import check_float, check_int, check_types, settle

__all__ = [
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "FinishReason",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]

MAX_LOGPROBS = 20
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
"""raw: the model's own; processed: after penalties, masks, temperature and filters. Every second one is of logits."""
MAX_N = 128
MAX_SEED = 2**64 - 1
MAX_STRINGS = 1000
MAX_STRING_CHARS = 16_384
"""Most stop strings or bad words of a request, and their characters together."""


class FinishReason(StrEnum):
    """Why a completion ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the output must look like: exactly one of json, regex, choice, grammar, json_object, structural_tag.

    Names are vLLM's.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as text or as an object."""
    regex: str | None = None
    """A regular expression that the whole output matches (Rust's syntax; no look-around, no back-references)."""
    choice: tuple[str, ...] | None = None
    """The output is one of these strings."""
    grammar: str | None = None
    """A context-free grammar, in Lark's or GBNF's syntax."""
    json_object: bool = False
    """Any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text in which what follows one of ``triggers`` is one of ``structures`` (begin, schema, end)."""
    thought: tuple[str, str] | None = None
    """Marks of a thought that may precede JSON or a structural tag, free of all constraint. An empty first one: the
    prompt has opened it."""
    llguidance: str | None = None
    """A grammar in llguidance's own JSON: what the front makes of the others."""
    disable_any_whitespace: bool = False
    """No whitespace between the tokens of JSON."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between the tokens of JSON. Default: at most eight blanks."""
    disable_additional_properties: bool = False
    """What holds anyway: an object gets no properties but those that its schema lists."""
    lenient: bool = False
    """Pass over what of a JSON schema cannot be enforced, instead of refusing it."""
    min_tokens: int = 0
    """The engine's own: ``SamplingParams.min_tokens``, kept only as long as the grammar can go on."""

    def __post_init__(self) -> None:
        """Lists become tuples; None is the default."""
        settle(self)

    def verify(self) -> None:
        """Raise :class:`RequestError` unless exactly one form is given, of the right type."""
        check_types(self, "structured_outputs.", "structured_outputs")
        forms = ("json", "regex", "choice", "grammar", "llguidance", "structural_tag")
        given = [name for name in forms if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise RequestError(
                "structured_outputs needs exactly one of json, regex, choice, grammar, json_object and structural_tag;"
                " it has " + (", ".join(given) or "none"),
                param="structured_outputs",
            )
        if self.choice is not None and not (
            self.choice and all(isinstance(each, str) and each for each in self.choice)
        ):
            raise RequestError(
                "structured_outputs.choice must be a list of at least one string, none of them empty",
                param="structured_outputs",
            )
        if self.thought is not None:
            self._verify_thought(given[0])

    def _verify_thought(self, form: str) -> None:
        marks: Any = self.thought
        if not (isinstance(marks, tuple | list) and len(marks) == 2 and all(isinstance(mark, str) for mark in marks)):
            raise RequestError("structured_outputs.thought must be two strings", param="structured_outputs")
        if not marks[1] or form not in ("json", "json_object", "structural_tag"):
            raise RequestError(
                "structured_outputs.thought needs a closing mark, and JSON or a structural_tag that comes after it",
                param="structured_outputs",
            )


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens, and when to stop. Names, defaults and meanings are vLLM's.

    The constructor settles what may be written in several ways: a lone stop string or bad word is one string, lists
    become tuples, None is the default, a dict of structured outputs is the object. It checks no bounds; :meth:`verify`
    does (every engine calls it, and :meth:`create`): :class:`~pagemill.errors.RequestError` names the parameter, the
    value and the limit.
    """

    n: int = 1
    """Completions per prompt, 1 to 128. They share the prompt's KV blocks."""
    temperature: float = 1.0
    """Divides the logits. 0 is greedy; at most 2 over HTTP, any finite value >= 0 here."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to this, in (0, 1]. At least one is kept."""
    top_k: int = 0
    """Keep the k most probable tokens. 0 and -1 mean off."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the best one, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides (multiplies, when negative) the logits of tokens in prompt or output; 1e-6 to 1e6."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens in the output, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output, -2 to 2."""
    seed: int | None = None
    """Keys the noise by (seed, position): same seed, same tokens, alone or batched. None draws a fresh one."""
    max_tokens: int | None = 16
    """Most output tokens. None: up to the context length."""
    min_tokens: int = 0
    """End-of-text and stop ids are suppressed before this many output tokens."""
    ignore_eos: bool = False
    """Generate past the end-of-text token."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; not part of it unless ``include_stop_str_in_output``."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output."""
    include_stop_str_in_output: bool = False
    """Keep the stop string (or stop token's text) in the output."""
    logit_bias: dict[int, float] = {}
    """Added to these tokens' logits, each -100 to 100."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be produced."""
    bad_words: tuple[str, ...] = ()
    """Strings that must not be produced."""
    logprobs: int | None = None
    """Report the chosen token's log probability and this many of the best, 0 to 20."""
    logprob_token_ids: tuple[int, ...] | None = None
    """Report these tokens, at most 20, in place of the best. Needs ``logprobs``."""
    logprobs_mode: str | None = None
    """What is reported: raw_logprobs, raw_logits, processed_logprobs or processed_logits. Default: the engine's."""
    prompt_logprobs: int | None = None
    """The same for every prompt token after the first."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens that are shown (SentencePiece vocabularies only)."""
    detokenize: bool = True
    """Produce text. Off: token ids only; stop strings need it on."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the prompt's tokens; -1: as many as leave room for ``max_tokens``. Nothing is ever cut
    without it."""
    truncation_side: str = "left"
    """Where it cuts: left keeps the last tokens, right the first."""
    structured_outputs: StructuredOutputsParams | None = None
    """Constrains the output to a JSON schema, a regular expression, a choice or a grammar."""

    @classmethod
    def create(cls, **values: Any) -> Self:
        """Build and verify."""
        unknown = sorted(set(values) - set(cls.__struct_fields__))
        if unknown:
            raise RequestError(
                f"unknown sampling parameter {unknown[0][:100]!r}{did_you_mean(unknown[0], cls.__struct_fields__)}",
                param=unknown[0],
            )
        params = cls(**values)
        params.verify()
        return params

    def __post_init__(self) -> None:
        """Settle what may be written in several ways."""
        for name in ("stop", "bad_words"):
            if isinstance(getattr(self, name), str):
                msgspec.structs.force_setattr(self, name, (getattr(self, name),))
        if isinstance(self.structured_outputs, dict):
            msgspec.structs.force_setattr(self, "structured_outputs", _structured(self.structured_outputs))
        if isinstance(self.logit_bias, dict) and any(isinstance(token, str) for token in self.logit_bias):
            msgspec.structs.force_setattr(self, "logit_bias", {_token_id(k): v for k, v in self.logit_bias.items()})
        settle(self)

    def verify(self) -> None:
        """Raise :class:`RequestError` for the first parameter of the wrong type or out of its bounds."""
        check_types(self)
        for name, least, most in _INT_BOUNDS:
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, least, most)
        for name, low, high, open_low in _FLOAT_BOUNDS:
            check_float(name, getattr(self, name), low, high, open_low=open_low)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}", param="min_tokens"
            )
        if self.structured_outputs is not None:
            self.structured_outputs.verify()
            if self.allowed_token_ids is not None:
                raise RequestError(
                    "allowed_token_ids and structured_outputs exclude each other; leave one out",
                    param="allowed_token_ids",
                )
        for name, choices in (("logprobs_mode", LOGPROBS_MODES), ("truncation_side", ("left", "right"))):
            if getattr(self, name) is not None and getattr(self, name) not in choices:
                raise RequestError(f"{name}={getattr(self, name)!r} is none of {', '.join(choices)}", param=name)
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens=0 leaves no prompt; it must be -1, or at least 1",
                param="truncate_prompt_tokens",
            )
        self._verify_collections()

    def _verify_collections(self) -> None:
        for name in ("stop", "bad_words"):
            self._check_strings(name, getattr(self, name))
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    raise RequestError(f"{name} holds {text!r}; each entry must be a non-empty string", param=name)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids instead", param="stop")
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            for token in getattr(self, name) or ():
                check_int(name, token, 0, 2**31 - 1)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty; name at least one token or leave it out", param="allowed_token_ids"
            )
        if self.logprob_token_ids is not None:
            if self.logprobs is None:
                raise RequestError("logprob_token_ids needs logprobs", param="logprob_token_ids")
            if len(self.logprob_token_ids) > MAX_LOGPROBS:
                raise RequestError(
                    f"logprob_token_ids has {len(self.logprob_token_ids)} entries; the limit is {MAX_LOGPROBS}",
                    param="logprob_token_ids",
                )
        for token, bias in self.logit_bias.items():
            check_int("logit_bias", token, 0, 2**31 - 1)
            check_float("logit_bias", bias, -100.0, 100.0)

    def _check_strings(self, name: str, texts: Sequence[object]) -> None:
        if len(texts) > MAX_STRINGS:
            raise RequestError(f"{name} has {len(texts)} entries; the limit is {MAX_STRINGS}", param=name)
        chars = sum(len(text) for text in texts if isinstance(text, str))
        if chars > MAX_STRING_CHARS:
            raise RequestError(f"{name} has {chars} characters in all; the limit is {MAX_STRING_CHARS}", param=name)

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature < MIN_TEMPERATURE


MIN_TEMPERATURE = 1e-5
"""Below this the softmax is one-hot in float32 for any logits a model produces; treated as greedy."""

_INT_BOUNDS: Sequence[tuple[str, int, int]] = (
    ("n", 1, MAX_N),
    ("top_k", -1, 2**31 - 1),
    ("seed", -(2**63), MAX_SEED),
    ("max_tokens", 0, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("truncate_prompt_tokens", -1, 2**31 - 1),
)
_FLOAT_BOUNDS: Sequence[tuple[str, float, float, bool]] = (
    ("temperature", 0.0, math.inf, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 1e-6, 1e6, False),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
)


def _structured(values: dict[str, Any]) -> StructuredOutputsParams:
    known = StructuredOutputsParams.__struct_fields__
    for name in values:
        if name not in known:
            raise RequestError(
                f"structured_outputs has the unknown field {str(name)[:100]!r}{did_you_mean(str(name), known)}",
                param="structured_outputs",
            )
    return StructuredOutputsParams(**values)


def _token_id(key: object) -> object:
    """JSON's keys are strings."""
    return int(key) if isinstance(key, str) and key.isascii() and key.strip().isdigit() and len(key) <= 10 else key


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to search for the most probable continuations. Names are vLLM's; nothing is drawn at random."""

    beam_width: int
    """Continuations that are followed, and given in the end, best first; as many as log probabilities allow."""
    max_tokens: int | None = 16
    """Most output tokens. None: up to the context length."""
    ignore_eos: bool = False
    """Search past the end-of-text token."""
    length_penalty: float = 1.0
    """A finished one's sum of log probabilities is divided by its length to this power: above 0 favours long ones."""
    logprobs: int | None = None
    """As in :class:`SamplingParams`."""

    def verify(self) -> None:
        """Raise :class:`RequestError` for the first parameter of the wrong type or out of its bounds."""
        check_types(self)
        check_int("beam_width", self.beam_width, 1, MAX_LOGPROBS)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 0, 2**31 - 1)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        check_float("length_penalty", self.length_penalty, -10.0, 10.0)


class Logprob(msgspec.Struct, frozen=True):
    """One candidate at one position."""

    logprob: float
    """Natural log of the probability, before temperature and filters; -9999.0 stands for minus infinity."""
    rank: int
    """1 for the most probable token."""
    decoded_token: str | None = None
    """The token's own text."""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of the ``n`` completions of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """Per output token: candidates by token id, the chosen one first."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for end-of-text and length."""
    error: str | None = None
    """Why, where ``finish_reason`` is ``error``."""

    @property
    def finished(self) -> bool:
        """Whether no more tokens follow."""
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, kw_only=True):
    """What has been produced for one prompt so far (a stream yields several; the last is ``finished``)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""
    finished: bool = False
    pooled: bytes | None = None
    """The vector, as little-endian float32, where one was asked for."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What kind of vector is wanted of an embedding model. Names and meanings are vLLM's."""

    dimensions: int | None = None
    """Keep this many of the vector's first values (models trained for it lose little), scaled to length 1 again."""
    normalize: bool | None = None
    """Scale to length 1. None: as the model's files say."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many of an input's first tokens, special ones included; -1: as many as fit. Nothing is ever cut
    without it."""

    def verify(self) -> None:
        """Raise :class:`RequestError` for the first parameter of the wrong type or out of its bounds."""
        check_types(self)
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, 1, 2**31 - 1)
        if self.truncate_prompt_tokens is not None:
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, 2**31 - 1)
            if self.truncate_prompt_tokens == 0:
                raise RequestError(
                    "truncate_prompt_tokens=0 leaves nothing; give at least 1, or -1 for as many as fit",
                    param="truncate_prompt_tokens",
                )


class EmbeddingOutput(msgspec.Struct, frozen=True):
    """One vector."""

    embedding: list[float]


class EmbeddingRequestOutput(msgspec.Struct, kw_only=True):
    """What :meth:`pagemill.LLM.embed` gives for one input."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    finished: bool = True


class ScoringOutput(msgspec.Struct, frozen=True):
    """How well two texts go together: higher is better."""

    score: float


class ScoringRequestOutput(msgspec.Struct, kw_only=True):
    """What :meth:`pagemill.LLM.score` gives for one pair."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True

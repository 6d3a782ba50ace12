"""The HTTP schema: what requests look like. Pydantic models, and how they become :class:`SamplingParams`.

Owns names, types and documentation of the fields; ranges are checked once, by ``SamplingParams.verify`` (and here
where HTTP is narrower). Types are strict: "5" is not 5. Fields that are not known are accepted and reported in a
response header, as clients of other servers send many.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from pagemill.errors import RequestError
from pagemill.params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from pagemill.server.shape import check_shape
from pagemill.server.structured import Constraints, structured_outputs
from pagemill.server.structured import Model as _Model
from pagemill.server.tools import ToolUse, read_tools
from pagemill.server.validation import from_validation

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "StreamOptions",
    "TokenizeRequest",
    "answer_headers",
    "parse",
]

MAX_TEMPERATURE = 2.0
MAX_BEST_OF = 128
MAX_DETOKENIZED = 1 << 18
ID_CHARS = r"^[\x21-\x7e]*$"

MAX_TOKEN_ID = (1 << 31) - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
LONG_LIST = 256
"""From here on a list is looked at as a whole: trying its elements against each form it may have takes long."""


def _quickly(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Long lists of token ids or texts, or of lists of ids, without a step of Python or an error for each."""
    if not isinstance(value, list) or len(value) < LONG_LIST:
        if isinstance(value, list) and sum(len(each) for each in value if isinstance(each, list)) >= LONG_LIST:
            return _all_ids(value)
        return handler(value)
    kinds = set(map(type, value))
    if kinds == {str}:
        return value
    return _all_ids(value) if kinds == {list} else _ids(value, kinds)


def _all_ids(value: list[list[int]]) -> list[list[int]]:
    for each in value:
        if not isinstance(each, list):
            raise PydanticCustomError("mixed", "text, token ids, or a list of either: not both in one list")
        _ids(each, set(map(type, each)))
    return value


def _ids(value: list[int], kinds: set[type]) -> list[int]:
    if kinds <= {int} and (not value or (min(value) >= 0 and max(value) <= MAX_TOKEN_ID)):
        return value
    raise PydanticCustomError("ids", "token ids, which are integers from 0 to 2147483647")


def _ids_quickly(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, list) and len(value) >= LONG_LIST:
        return _ids(value, set(map(type, value)))
    return handler(value)


TokenIds = Annotated[list[TokenId], WrapValidator(_ids_quickly)]
Prompts = Annotated[str | list[TokenId] | list[str] | list[list[TokenId]], WrapValidator(_quickly)]


class StreamOptions(_Model):
    """What a stream carries besides the text."""

    include_usage: bool | None = Field(None, description="Send one last chunk with the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far with every chunk (vLLM).")


class _Sampling(Constraints):
    """Sampling parameters that both routes share; names and meanings are OpenAI's and vLLM's."""

    model: str | None = Field(None, description="Served name; empty or absent means the default model.")
    temperature: float | None = Field(None, description="0 is greedy; 0 to 2. Default 1.")
    top_p: float | None = Field(None, description="In (0, 1]. Default 1.")
    top_k: int | None = Field(None, description="Keep the k best; 0 and -1 mean off.")
    min_p: float | None = Field(None, description="In [0, 1]. Default 0.")
    repetition_penalty: float | None = Field(None, description="1e-6 to 1e6. Default 1.")
    presence_penalty: float | None = Field(None, description="-2 to 2. Default 0.")
    frequency_penalty: float | None = Field(None, description="-2 to 2. Default 0.")
    seed: int | None = Field(None, description="Same seed, same tokens.")
    n: int | None = Field(None, description="Completions per prompt, 1 to 128. Default 1.")
    min_tokens: int | None = Field(None, description="Do not end before this many tokens.")
    ignore_eos: bool | None = Field(None, description="Generate past the end-of-text token.")
    stop: str | list[str] | None = Field(None, description="Strings that end the output.")
    stop_token_ids: TokenIds | None = Field(None, description="Token ids that end the output.")
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop string in the text.")
    logit_bias: dict[str, float] | None = Field(None, description="Token id (as a string) to a bias, -100 to 100.")
    allowed_token_ids: TokenIds | None = Field(None, description="Only these tokens may be produced.")
    bad_words: list[str] | None = Field(None, description="Strings that must not be produced.")
    prompt_logprobs: int | None = Field(None, description="Logprobs of the prompt's tokens, 0 to 20 candidates.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text. Default true.")
    spaces_between_special_tokens: bool | None = Field(None, description="Default true.")
    logprob_token_ids: TokenIds | None = Field(
        None, description="Report these tokens, at most 20, in place of the best; needs logprobs (vLLM)."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Write the tokens of logprobs as token_id:N (vLLM). Default: as the server is set."
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep only this many of the prompt's tokens; -1: as many as leave room for max_tokens."
    )
    truncation_side: str | None = Field(
        None, description="left keeps the prompt's last tokens (the default), right its first."
    )
    stream: bool | None = Field(None, description="Send server-sent events as tokens come.")
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, description="Lower goes first (with --scheduling-policy priority).")
    request_id: str | None = Field(None, max_length=128, pattern=ID_CHARS, description="Part of the answer's id.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Share cached prefixes only within this salt."
    )
    return_token_ids: bool | None = Field(None, description="Add token ids to the answer (vLLM).")
    user: str | None = None
    use_beam_search: bool | None = Field(None, description="Find the n most probable outputs; n is the beams' number.")
    length_penalty: float | None = Field(None, description="Of beam search, -10 to 10; above 0 favours long outputs.")

    def _params(self, defaults: dict[str, Any], max_tokens: int | None, logprobs: int | None, n: int) -> SamplingParams:
        """Check everything that is the same for both routes."""
        if self.temperature is not None and not 0 <= self.temperature <= MAX_TEMPERATURE:  # NaN is not either
            raise RequestError(
                f"temperature={self.temperature:g} is out of range; it must be between 0 and {MAX_TEMPERATURE:g}",
                param="temperature",
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true", param="stream_options")
        self._refuse_unsupported()
        values = dict(defaults)
        for name in _PASSED_ON:
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        if self.logit_bias:
            values["logit_bias"] = {_token_key(key): bias for key, bias in self.logit_bias.items()}
        structured = structured_outputs(self)
        if structured is not None:
            values["structured_outputs"] = structured
        return SamplingParams.create(**values, max_tokens=max_tokens, logprobs=logprobs, n=n)

    def _refuse_unsupported(self) -> None:
        """What would change the answer and is not there must not be passed over in silence."""
        for name, value in (self.model_extra or {}).items():
            if name in _NOT_BUILT and value not in (None, False, [], {}):
                raise RequestError(f"{name} is not supported by this version; leave it out", param=name)

    def beams(self, params: SamplingParams) -> BeamSearchParams | None:
        """How to search, where that is asked for; RequestError for what has no meaning then."""
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1):  # vLLM's default, which some clients send
                raise RequestError("length_penalty needs use_beam_search=true", param="length_penalty")
            return None
        given = [name for name in _NOT_WITH_BEAMS if getattr(self, name, None) not in (None, False, 0, [], {})]
        given += ["repetition_penalty"] if self.repetition_penalty not in (None, 1) else []
        given += ["tool_choice"] if params.structured_outputs is not None else []
        given += ["echo"] if params.prompt_logprobs is not None else []
        if given:
            raise RequestError(f"{given[0]} and use_beam_search exclude each other; leave one out", param=given[0])
        searched = BeamSearchParams(
            beam_width=params.n,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            logprobs=params.logprobs,
        )
        searched.verify()
        return searched

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "logprob_token_ids",
)
_CONSTRAINTS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_NOT_WITH_BEAMS = (
    *("stream", "best_of", "response_format", *_CONSTRAINTS, "stop", "stop_token_ids", "logit_bias"),
    *("allowed_token_ids", "bad_words", "min_tokens", "presence_penalty", "frequency_penalty", "prompt_logprobs"),
    *("truncate_prompt_tokens", "logprob_token_ids"),
)
"""What beam search would pass over in silence. Temperature, top_p and the like have nothing to choose from."""
_NOT_BUILT = frozenset(
    {
        "prompt_embeds",
        "logits_processors",
        "audio",
        "functions",
        "function_call",
        "thinking_token_budget",
        "repetition_detection",
        "watermarking",
        "vllm_xargs",
    }
)
"""Parameters of OpenAI or vLLM that change the answer and that Pagemill lacks."""


class CompletionRequest(_Sampling):
    """POST /v1/completions"""

    prompt: Prompts = Field(description="Text, token ids, or a list of either.")
    max_tokens: int | None = Field(16, description="Most output tokens; null means up to the context's end.")
    logprobs: int | None = Field(None, description="Logprobs of the output's tokens, 0 to 20 candidates.")
    echo: bool | None = Field(None, description="Put the prompt before the output.")
    best_of: int | None = Field(None, description="Generate this many and return the n most probable.")
    suffix: str | None = Field(None, description="Not supported.")
    add_special_tokens: bool | None = Field(None, description="Add the model's BOS to a text prompt. Default true.")

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Check and convert; ``defaults`` are the model's. Raises RequestError."""
        if self.suffix:
            raise RequestError("suffix is not supported; put it into the prompt", param="suffix")
        n = 1 if self.n is None else self.n
        params = self._params(defaults, self.max_tokens, self.logprobs, n)
        if self.best_of is not None:
            params = self._best_of_params(params, self.best_of)
        if self.echo and self.logprobs is not None and params.prompt_logprobs is None:
            params = SamplingParams.create(**_fields(params, prompt_logprobs=self.logprobs))
        return params

    def _best_of_params(self, params: SamplingParams, best_of: int) -> SamplingParams:
        if not params.n <= best_of <= MAX_BEST_OF:
            raise RequestError(
                f"best_of={best_of} is out of range; it must be between n={params.n} and {MAX_BEST_OF}", param="best_of"
            )
        if self.stream and best_of > params.n:
            raise RequestError(
                "best_of cannot be streamed: which outputs are best is known at the end; leave out best_of or stream",
                param="best_of",
            )
        logprobs = params.logprobs if best_of == params.n or params.logprobs is not None else 0
        # Sums of logits would rank nothing.
        mode = "raw_logprobs" if best_of > params.n else params.logprobs_mode
        return SamplingParams.create(**_fields(params, n=best_of, logprobs=logprobs, logprobs_mode=mode))


class ChatMessage(_Model):
    """One turn. ``content`` is text or a list of text parts."""

    role: str = Field(min_length=1, max_length=64)
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatCompletionRequest(_Sampling):
    """POST /v1/chat/completions"""

    messages: list[ChatMessage] = Field(description="The conversation so far.")
    max_tokens: int | None = Field(None, description="Most output tokens. Default: up to the context's end.")
    max_completion_tokens: int | None = Field(None, description="OpenAI's newer name for max_tokens; it wins.")
    logprobs: bool | None = Field(None, description="Return the log probability of each output token.")
    top_logprobs: int | None = Field(None, description="0 to 20 of the best candidates; needs logprobs=true.")
    echo: bool | None = Field(None, description="Repeat the last message before the answer, if it has its role.")
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn. Default true.")
    continue_final_message: bool | None = Field(None, description="Go on with the last message in place of a new one.")
    add_special_tokens: bool | None = Field(None, description="Add BOS to the rendered text. Default false.")
    chat_template: str | None = Field(None, max_length=100_000, description="A Jinja template for this request.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the template.")
    documents: list[dict[str, Any]] | None = Field(None, description="Documents for the template.")
    tools: list[dict[str, Any]] | None = Field(None, description="Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="auto (the default), none, required, or one function by its name."
    )
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls in one answer. Default true.")
    reasoning_effort: str | None = Field(
        None, max_length=32, description="For the template; none turns thinking off where the template can."
    )
    include_reasoning: bool | None = Field(None, description="Return what the model thought. Default true (vLLM).")

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Check and convert; ``defaults`` are the model's. Raises RequestError."""
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, name) and not self.logprobs:
                raise RequestError(f"{name} needs logprobs=true", param=name)
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one of them",
                param="add_generation_prompt",
            )
        forced = self.tool_use.schema()
        if forced is not None and (given := [name for name in _CONSTRAINTS if getattr(self, name) is not None]):
            raise RequestError(f"{given[0]} and a tool_choice that forces a call exclude each other", param=given[0])
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        try:
            params = self._params(defaults, limit, logprobs, 1 if self.n is None else self.n)
        except RequestError as error:
            if error.param == "logprobs":
                raise RequestError(str(error).replace("logprobs", "top_logprobs", 1), param="top_logprobs") from None
            raise
        if forced is None:
            return params
        # response_format is about the content, and there will be none.
        structured = StructuredOutputsParams(json=forced, lenient=not self.tool_use.strict)
        return SamplingParams.create(**_fields(params, structured_outputs=structured))

    @cached_property
    def tool_use(self) -> ToolUse:
        """What tools and tool_choice come to. Raises RequestError."""
        return read_tools(self.tools, self.tool_choice, parallel=self.parallel_tool_calls is not False)


class TokenizeRequest(_Model):
    """POST /tokenize: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for prompt, false for messages.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, max_length=100_000)
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Model):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[TokenIds, Field(max_length=MAX_DETOKENIZED)]


RequestT = TypeVar("RequestT", bound=_Model)


def parse(cls: type[RequestT], body: bytes | bytearray) -> RequestT:
    """Read a body; raises RequestError naming the field."""
    body = bytes(body)
    check_shape(body)
    try:
        return cls.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


_HEADER_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
SILENT = frozenset({"store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"})
"""OpenAI's own fields that mean nothing here and that clients send by themselves."""


def answer_headers(request_id: str, asked: _Model, *, known: Collection[str] = ()) -> dict[str, str]:
    """The request's id, and the names of the fields that were sent and are not known."""
    names = [name for name in asked.model_extra or {} if name not in SILENT | _NOT_BUILT | set(known)]
    shown = (_HEADER_UNSAFE.sub("", name[:64]) for name in names[:16])
    ignored = ", ".join(filter(None, shown))
    headers = {"x-request-id": request_id}
    if ignored:
        headers["x-pagemill-ignored"] = ignored
    return headers


def _token_key(key: str) -> int:
    text = key.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise RequestError(f"logit_bias has the key {key[:40]!r}; keys must be token ids", param="logit_bias")
    return int(text)


def _fields(params: SamplingParams, **changed: Any) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__} | changed

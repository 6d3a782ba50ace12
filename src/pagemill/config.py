"""Every knob, declared once: name, default, bounds, and the docstring that is its ``--help``.

Frozen dataclasses with vLLM's names. ``flags()`` lists the fields for the command line; ``validate()`` checks bounds.
The only module that reads ``os.environ`` (paths, log level, debugging).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import os
import re
import textwrap
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagemill.errors import ConfigError
from pagemill.params import LOGPROBS_MODES

__all__ = ["EngineConfig", "Flag", "ServerConfig", "cache_dir", "docstrings", "flags", "human_int", "offline"]

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The embedded default; see models/sources.py."""
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "phi4_mini_json", "granite", "json")
DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names."""
ORIGIN = (r"\*|[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@]+", "* or scheme://host[:port], such as https://example.org")
REASONING_PARSERS = ("auto", "none", "qwen3", "deepseek_r1", "mistral")


def knob(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    form: tuple[str, str] | None = None,
    secret: bool = False,
) -> Any:
    """A field with its bounds (inclusive). A secret one is not part of the text that stands for the config.

    ``form``: a regular expression that each of its texts matches, and what that means in words.
    """
    bounds = {"low": low, "high": high, "choices": choices, "form": form}
    return field(default=default, repr=not secret, metadata=bounds)


_INT = re.compile(r"([-+]?\d[\d_]*(?:\.\d+)?)([kKmMgGtT]?)")
_FACTORS = {"": 1, **{unit: 1000 ** (i + 1) for i, unit in enumerate("kmgt")}}
_FACTORS |= {unit: 1024 ** (i + 1) for i, unit in enumerate("KMGT")}


def human_int(text: str) -> int:
    """``4096``, ``4k`` (4,000), ``4K`` (4,096), ``1.5G``: as vLLM reads them. Raises ValueError."""
    match = _INT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a whole number (4096, 4k = 4000, 4K = 4096, 2G)")
    number, unit = match.groups()
    if not unit and "." in number:
        raise ValueError(f"{text!r} is not a whole number")
    return int(float(number) * _FACTORS[unit]) if "." in number else int(number) * _FACTORS[unit]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the model runs and how its memory is used.

    Whole numbers may be written as on the command line ("4k"), and types under vLLM's other names (half, float).
    """

    def __post_init__(self) -> None:
        """Settle what may be written in several ways; :func:`validate` checks it."""
        for name, hint in typing.get_type_hints(EngineConfig).items():
            value = getattr(self, name)
            if isinstance(value, str) and int in (hint, *typing.get_args(hint)):
                try:
                    object.__setattr__(self, name, human_int(value))
                except ValueError as error:
                    raise ConfigError(f"{_option(name)}={error}") from None
        for name in ("dtype", "kv_cache_dtype"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, DTYPES.get(value, value))

    model: str = knob(DEFAULT_MODEL)
    """Folder, .gguf file, hub id, or the embedded default."""
    tokenizer: str | None = knob(None)
    """Where the tokenizer is, when not with the model."""
    revision: str | None = knob(None)
    """Branch, tag or commit of a hub id."""
    dtype: str = knob("auto", choices=("auto", "bfloat16", "float16", "float32"))
    """Type of weights and activations. auto keeps what the file says (a quantised file keeps its integers)."""
    quantization: str | None = knob(None, choices=("int8",))
    """int8: turn the checkpoint into rotated int8 while loading; the fastest for many users on a CPU."""
    device: str = knob("auto", choices=("auto", "cpu", "cuda"))
    """Where the model runs. auto takes a GPU if there is one."""
    kernels: str = knob("auto", choices=("auto", "native", "reference"))
    """native: the C++ kernels; reference: PyTorch's own functions. auto takes native where it was built."""
    num_threads: int | None = knob(None, low=1, high=1024)
    """Threads of the CPU kernels. Default: the physical cores this process may use."""
    seed: int = knob(0, low=0, high=2**63 - 1)
    """Where requests without a seed draw theirs from."""
    max_model_len: int | None = knob(None, low=1)
    """Longest context in tokens. Default: the model's own, lowered (and said) when it does not fit in memory."""
    block_size: int = knob(16, low=1, high=256)
    """Tokens per KV block."""
    kv_cache_dtype: str = knob("auto", choices=("auto", "bfloat16", "float16", "float32", "int8"))
    """Type of cached keys and values. auto: int8 beside integer weights, float32 beside float32 ones, else bfloat16."""
    kv_cache_memory_bytes: int | None = knob(None, low=1)
    """Memory of the KV cache in bytes. Default: planned from what the machine has."""
    gpu_memory_utilization: float = knob(0.9, low=0.01, high=1.0)
    """Share of the device's memory (RAM on a CPU) that weights, activations and KV cache may use together."""
    num_gpu_blocks_override: int | None = knob(None, low=1)
    """Exact number of KV blocks, for tests."""
    max_num_seqs: int = knob(64, low=1, high=65536)
    """Most requests in one step."""
    max_num_batched_tokens: int = knob(2048, low=1, high=1 << 20)
    """Most tokens in one step, prompts and decodes together."""
    long_prefill_token_threshold: int = knob(0, low=0)
    """Most prompt tokens of one request in one step; 0: no limit but the step's."""
    max_stall_ms: float = knob(100.0, low=0.0)
    """How long a step's prompts may hold up requests that decode, in milliseconds: cut by the speed of the last
    steps. 0: as long as --max-num-batched-tokens take, as always offline (LLM), where nobody reads along."""
    enable_prefix_caching: bool = knob(True)
    """Store common prefixes once."""
    scheduling_policy: str = knob("fcfs", choices=("fcfs", "priority"))
    """Who goes next: fcfs (first come), priority (lower value first, then first come)."""
    runner: str = knob("auto", choices=("auto", "generate", "pooling"))
    """generate: text; pooling: a vector for each input. auto: pooling for encoders and sentence-transformers models."""
    pooler_config: str | None = knob(None)
    """JSON with pooling_type (CLS, LAST, MEAN) and normalize, in place of what the model's files say."""
    max_logprobs: int = knob(20, low=0, high=20)
    """Most logprobs a request may ask for."""
    logprobs_mode: str = knob("raw_logprobs", choices=LOGPROBS_MODES)
    """What logprobs tell: raw, the model's own, or processed, after penalties, masks, temperature and filters; log
    probabilities or the logits themselves."""
    swap_space: float = knob(0.0, low=0.0)
    """GiB of host memory behind the KV cache. Not used on a CPU, where KV is in host memory already."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the HTTP server listens and what it lets in."""

    host: str = knob("127.0.0.1")
    """Address to listen on. 0.0.0.0 opens it to the network: set --api-key too."""
    port: int = knob(8000, low=0, high=65535)
    """Port to listen on; 0 takes a free one."""
    served_model_name: str | None = knob(None)
    """Name that clients use. Default: the model's own."""
    api_key: tuple[str, ...] = knob((), secret=True)
    """Key that clients must send as a bearer token; repeat the flag for more. None: no key is asked for. Others can see
    a command line: prefer --api-key-file."""
    api_key_file: str | None = knob(None)
    """File with a key a line, or name:sha256 (the key's hash); read again on SIGHUP and when it changes."""
    share_prefix_cache: bool = knob(False)
    """Let requests with different API keys find each other's cached prefixes (and tell, by time, what others asked)."""
    allowed_origins: tuple[str, ...] = knob((), form=ORIGIN)
    """Web site whose pages may use the server from a browser (CORS), as scheme://host[:port]; * for all. Repeat the
    flag for more, or give a JSON list. None: only its own page."""
    allowed_methods: tuple[str, ...] = knob(("*",))
    """HTTP method that those pages may use; repeat the flag for more, or give a JSON list."""
    allowed_headers: tuple[str, ...] = knob(("*",))
    """Request header that those pages may send; repeat the flag for more, or give a JSON list."""
    allow_credentials: bool = knob(False)
    """Let those pages send what the browser has stored for this server."""
    ssl_certfile: str | None = knob(None)
    """Certificate chain (PEM): the server speaks HTTPS. Read again on SIGHUP."""
    ssl_keyfile: str | None = knob(None)
    """Private key of the certificate, when not in the same file."""
    ssl_ca_certs: str | None = knob(None)
    """Certificates (PEM) that clients' certificates must come from. Default: clients need none."""
    chat_template: str | None = knob(None)
    """A Jinja file (or the template itself) in place of the model's own."""
    enable_auto_tool_choice: bool = knob(True)
    """Let the model choose to call tools; without it their calls stay in the text."""
    tool_call_parser: str = knob("auto", choices=TOOL_CALL_PARSERS)
    """How the model writes tool calls. auto: as its chat template says."""
    reasoning_parser: str = knob("auto", choices=REASONING_PARSERS)
    """How the model marks what it thinks before it answers. auto: as its chat template says; none: leave it in."""
    return_tokens_as_token_ids: bool = knob(False)
    """Write the tokens of logprobs as token_id:N, so that every one can be told apart."""
    max_body_bytes: int = knob(4 * 1024 * 1024, low=1024)
    """Largest request body."""
    h11_max_incomplete_event_size: int = knob(64 * 1024, low=1024)
    """Most bytes of a request's head: its line and its headers (the name is vLLM's)."""
    h11_max_header_count: int = knob(256, low=8)
    """Most headers of a request."""
    max_connections: int = knob(4096, low=1)
    """Most connections; for one more, the one idle longest is closed."""
    timeout_read: float = knob(60.0, low=0.01)
    """Seconds that a client may take to send a request's head, and again to send its body."""
    request_timeout: float = knob(0.0, low=0.0)
    """Seconds that a request may take in all; then it is aborted and answered 504. 0: as long as it needs."""
    max_num_queued_reqs: int = knob(2048, low=1)
    """Most requests waiting or running; one more is answered 429 with Retry-After."""
    max_num_queued_tokens: int | None = knob(None, low=1)
    """Most prompt tokens waiting for their first output token; past it, 429. Default: no such limit."""
    max_stored_responses: int = knob(1024, low=0)
    """Most responses of /v1/responses kept in memory; the oldest finished ones make room."""
    max_stored_response_bytes: int = knob(64 * 1024 * 1024, low=0)
    """Most bytes of them, the conversations they belong to included."""
    shutdown_timeout: float = knob(30.0, low=0.0)
    """Seconds that open requests get to finish after SIGTERM."""
    timeout_keep_alive: int = knob(120, low=1)
    """Seconds an idle connection stays open; longer than proxies' so that they close first."""
    enable_log_requests: bool = knob(False)
    """Write a line of JSON to stdout for each request that ends: ids, times, counts, reasons; no content."""
    enable_log_content: bool = knob(False)
    """Put prompts and outputs into those lines."""
    max_log_len: int | None = knob(None, low=0)
    """Most characters of each prompt and output in them. Default: all."""
    otlp_traces_endpoint: str | None = knob(None)
    """OpenTelemetry collector that gets a span per request: grpc://host:4317 or http://host:4318/v1/traces. Needs
    pip install 'pagemill[otel]'."""
    log_level: str = knob("info", choices=("debug", "info", "warning", "error"))
    """How much is logged about the server itself; never prompts."""


@dataclass(frozen=True)
class Flag:
    """One field as a command-line flag."""

    name: str
    type: type
    optional: bool
    repeated: bool
    default: Any
    choices: tuple[str, ...] | None
    help: str
    secret: bool

    @property
    def option(self) -> str:
        """As it is written on the command line."""
        return _option(self.name)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@functools.cache
def docstrings(cls: type) -> dict[str, str]:
    """The string literal that follows each field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for here, after in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(here, ast.AnnAssign)
            and isinstance(here.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[here.target.id] = " ".join(str(after.value.value).split())
    return docs


def flags(cls: type) -> tuple[Flag, ...]:
    """The fields of a config class as flags, in order."""
    hints = typing.get_type_hints(cls)
    found = []
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        repeated = typing.get_origin(hint) is tuple
        optional = type(None) in typing.get_args(hint)
        base = parts[0] if repeated or optional else hint
        found.append(
            Flag(
                name=item.name,
                type=base,
                optional=optional,
                repeated=repeated,
                default=item.default,
                choices=item.metadata["choices"],
                help=docstrings(cls)[item.name],
                secret=not item.repr,
            )
        )
    return tuple(found)


def validate(config: EngineConfig | ServerConfig) -> None:
    """Raise :class:`ConfigError` for the first field of the wrong type or out of bounds."""
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        name = _option(item.name)
        if not _has_type(value, hints[item.name]):
            raise ConfigError(f"{name}={value!r} has the wrong type; it must be {_type_name(hints[item.name])}")
        if value is None:
            continue
        if item.metadata["form"] is not None:
            pattern, words = item.metadata["form"]
            for part in value:
                if not re.fullmatch(pattern, part):
                    raise ConfigError(f"{name}={part!r} must be {words}")
        low, high, choices = item.metadata["low"], item.metadata["high"], item.metadata["choices"]
        if choices is not None and value not in choices:
            raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")
        if low is not None and value < low:
            raise ConfigError(f"{name}={value} is too small; the least is {low:g}")
        if high is not None and value > high:
            raise ConfigError(f"{name}={value} is too large; the most is {high:g}")


def _has_type(value: object, hint: Any) -> bool:
    options = typing.get_args(hint) if typing.get_origin(hint) is not tuple else ()
    if options:
        return any(_has_type(value, option) for option in options)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(isinstance(part, str) for part in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _type_name(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint).replace("NoneType", "None"))


def cache_dir() -> Path:
    """Where fetched and converted weights are kept: $PAGEMILL_CACHE, else ~/.cache/pagemill."""
    given = os.environ.get("PAGEMILL_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "pagemill"


def offline() -> bool:
    """Whether nothing may be fetched: HF_HUB_OFFLINE, the hub's own switch."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}


def tokenize_in_own_thread() -> None:
    """Keep the tokenizers' library from spreading texts over all cores, which the model needs.

    TOKENIZERS_PARALLELISM, where it is set, holds.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def isa_override() -> str | None:
    """PAGEMILL_ISA: the instruction set to use in place of the best one (debugging)."""
    return os.environ.get("PAGEMILL_ISA") or None

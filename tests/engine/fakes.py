"""A model without a model: the next token is a function of the tokens so far; and real tokenizers made on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from pagemill.core.kv_cache import KVCacheSpec
from pagemill.core.messages import SchedulerOutput, StepResult, TokenLogprobs
from pagemill.errors import RequestError
from pagemill.model_config import LayerConfig, ModelConfig
from pagemill.models.tokenizer import Tokenizer
from tests.models.tiny import tiny_tokenizer

VOCAB_SIZE = 320
MODEL_CONFIG = ModelConfig(
    architecture="Fake",
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    layers=(LayerConfig(rope=None),),
    max_position_embeddings=256,
    norm_eps=1e-5,
    attention_scale=1.0,
    eos_token_ids=(2,),
)
NextToken = Callable[[list[int], int], int]
"""(tokens so far, seed) -> next token."""


def scramble(token_ids: list[int], seed: int) -> int:
    """Depends on the whole sequence; never a special token."""
    return 5 + (sum(token_ids) * 31 + len(token_ids) * 7 + seed) % (VOCAB_SIZE - 5)


class FakeExecutor:
    """Runs plans as a worker does, with ``next_token`` in place of a model."""

    def __init__(self, next_token: NextToken = scramble, *, num_blocks: int = 64, max_model_len: int = 256) -> None:
        self.kv_specs = [KVCacheSpec(kind="full", layers=(0,), block_size=4, bytes_per_block=64, num_blocks=num_blocks)]
        self.model_config = MODEL_CONFIG
        self.max_model_len = max_model_len
        self.memory_plan = "none"
        self.next_token = next_token
        self.rows: dict[str, tuple[list[int], int, Any]] = {}
        self.computed: dict[str, int] = {}
        self.events: list[str] = []
        self.asynchronous = False
        self.num_cpus, self.num_free_cpus = 1, 0
        self.closed = False

    def execute(self, plan: SchedulerOutput) -> int:
        self.events.append("execute")
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            self.rows.pop(request_id, None)
        for row in plan.new_rows:
            self.rows[row.request_id] = (list(row.token_ids), row.seed, row.params)
            self.computed[row.request_id] = row.num_computed_tokens
        return plan.step

    def sample(self, plan: SchedulerOutput, constraints: Any, handle: int) -> StepResult:
        assert handle == plan.step
        self.events.append("sample")
        sampled: list[list[int]] = []
        logprobs: list[list[TokenLogprobs] | None] = []
        prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        for request_id, count in zip(plan.request_ids, plan.num_new_tokens, strict=True):
            token_ids, seed, params = self.rows[request_id]
            start = self.computed[request_id]
            if params.prompt_logprobs is not None:
                after = token_ids[start + 1 : start + count + 1]
                prompt_logprobs[request_id] = [[(token, -1.5, 1)] for token in after]
            self.computed[request_id] = start + count
            new: list[int] = []
            if start + count == len(token_ids):
                new = [self.next_token(token_ids, seed)]
                token_ids.extend(new)
            sampled.append(new)
            wanted = params.logprobs
            logprobs.append(None if wanted is None else [_candidates(token, wanted) for token in new])
        return StepResult(token_ids=sampled, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def call(self, name: str, *args: Any) -> Any:
        if name == "echo":
            return list(args)
        raise RequestError(f"unknown engine operation {name!r}")

    def shutdown(self) -> None:
        self.closed = True


def _candidates(token: int, wanted: int) -> TokenLogprobs:
    best = [(token, -0.25, 1), *((other, -2.0 - other, other) for other in range(2, wanted + 1))]
    return [(token, -0.25, 1), *best[:wanted]]


def scripted(script: Sequence[int]) -> NextToken:
    """Emits the script whatever the prompt: position i of the output is ``script[i]``, then end-of-text.

    The output is found by the marker token 4, which must end the prompt.
    """

    def next_token(token_ids: list[int], seed: int) -> int:
        done = len(token_ids) - 1 - token_ids.index(4)
        return script[done] if done < len(script) else 2

    return next_token


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE: any token may be part of a code point."""
    return Tokenizer(tiny_tokenizer(), special_tokens={}, eos_ids=(2,))


def sentencepiece_tokenizer() -> Tokenizer:
    """A BPE as SentencePiece makes them: a space before the text, bytes for what is not in the vocabulary."""
    words = ["▁the", "▁world", "Hello", "▁Hello", "▁", "w", "o", "r", "l", "d", "e", "H", "é", "."]
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(special)
    return Tokenizer(backend, special_tokens={}, eos_ids=(2,))

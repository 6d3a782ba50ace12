"""An engine whose tokens are known: it spells a script, one byte a token, so that every expected answer is plain.

Same interface as ``AsyncLLM``. Token ids 0 to 255 are bytes, 256 is BOS, 257 ends the text, 258 and 259 open and close
a chat turn. Every token has the log probability of its rank, and the candidates are its neighbours.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pagemill.engine.caller import CALLER, Caller
from pagemill.engine.metrics import Metrics
from pagemill.engine.pooling import PoolingPrompt
from pagemill.errors import EngineDeadError, PagemillError, PromptTooLongError, QueueFullError, RequestError
from pagemill.model_config import PoolingConfig
from pagemill.models.chat_template import ChatTemplate
from pagemill.params import CompletionOutput, FinishReason, Logprob, RequestOutput, SamplingParams

BOS, EOS, OPEN, CLOSE = 256, 257, 258, 259
SPECIALS = {BOS: "<s>", EOS: "</s>", OPEN: "<|open|>", CLOSE: "<|close|>"}


class ByteTokenizer:
    vocab_size = 260
    special_ids = frozenset(SPECIALS)
    bos_id = BOS
    eos_ids = (EOS,)
    special_tokens: ClassVar = {"bos_token": "<s>", "eos_token": "</s>"}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS] if add_special_tokens else []
        while text:
            for token, name in SPECIALS.items():
                if text.startswith(name):
                    ids.append(token)
                    text = text[len(name) :]
                    break
            else:
                ids += text[0].encode()
                text = text[1:]
        return ids

    def min_tokens(self, text: str) -> int:
        return -(-len(text) // len("<|close|>"))

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], int, int | None]]:
        found = []
        for first, second in pairs:
            head = [*self.encode(first), EOS]
            found.append(([*head, *self.encode(second, add_special_tokens=False), EOS], len(head), len(head)))
        return found

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [token for token in ids if not (skip_special_tokens and token in SPECIALS)]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        return SPECIALS.get(token_id) or (chr(token_id) if token_id < 256 else None)

    def token_bytes(self, token_id: int) -> bytes:
        return SPECIALS[token_id].encode() if token_id in SPECIALS else bytes([token_id])


TEMPLATE = (
    "{% for message in messages %}<|open|>{{ message.role }}: {{ message.content }}<|close|>{% endfor %}"
    "{% if add_generation_prompt %}<|open|>assistant: {% endif %}"
)


@dataclass
class FakeHealth:
    alive: bool = True
    heartbeat_age_s: float = 0.0
    restarts: int = 0
    reason: str | None = None


class FakeText:
    def __init__(self) -> None:
        self.defaults: dict[str, Any] = {}

    def default_values(self) -> dict[str, Any]:
        return self.defaults


class FakeEngine:
    """Spells ``script``. A closed ``gate`` holds tokens back; ``failure`` is raised after ``fail_after`` tokens."""

    def __init__(
        self, script: str = "Hello, world.", *, max_model_len: int = 512, pooling: PoolingConfig | None = None
    ) -> None:
        self.script = script
        self.pooling = pooling
        self.embedding_size = 64
        self.pooled: list[PoolingPrompt] = []
        """Every input of which a vector was asked for."""
        self.text = FakeText()
        self.tokenizer = ByteTokenizer()
        self.chat_template: ChatTemplate | None = ChatTemplate(TEMPLATE, self.tokenizer)  # type: ignore[arg-type]
        self.max_model_len = max_model_len
        self.model_name = "fake/model"
        self.metrics = Metrics(model_name=self.model_name, max_model_len=max_model_len)
        self.state = FakeHealth()
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: PagemillError | None = None
        self.fail_after = 0
        self.hold_after: int | None = None
        """So many tokens come, and then none until the client goes away."""
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.seen: list[tuple[list[int], SamplingParams, str]] = []
        self.num_blocks = 10
        self.max_num_queued_tokens: int | None = None
        self.calls = 0
        self.callers: list[Caller] = []
        self.stopped = False

    def health(self) -> FakeHealth:
        return self.state

    async def call(self, name: str, *args: Any) -> Any:
        """What is running holds one block each; the last block is always cached."""
        assert name == "block_states"
        assert not args
        self.calls += 1
        if not self.state.alive:
            raise EngineDeadError("the engine is starting again; retry")
        return [("p" * len(self.running)).ljust(self.num_blocks - 1, "f") + "c"]

    async def shutdown(self, timeout_s: float = 0.0) -> None:
        self.stopped = True
        self.failure = EngineDeadError("the server is stopping")
        self.fail_after = -1
        self.gate.set()

    def check_room(self, num_new: int) -> None:
        if self.max_num_queued_tokens is not None and num_new > self.max_num_queued_tokens:
            raise QueueFullError(f"{num_new} prompt tokens; the limit is {self.max_num_queued_tokens}", retry_after_s=1)

    async def pool(
        self, prompts: Sequence[PoolingPrompt], request_id: str, *, priority: int = 0, cache_salt: str | None = None
    ) -> list[RequestOutput]:
        """How often each byte stands in the text, by its value modulo the vector's size; one score: the length."""
        assert self.pooling is not None
        self.pooled += prompts
        self.running.add(request_id)
        try:
            await self.gate.wait()
            if self.failure is not None:
                raise self.failure
            return [self._vector(prompt, request_id) for prompt in prompts]
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        finally:
            self.running.discard(request_id)

    def _vector(self, prompt: PoolingPrompt, request_id: str) -> RequestOutput:
        if len(prompt.token_ids) > self.max_model_len:
            raise PromptTooLongError(
                f"{len(prompt.token_ids)} tokens; the limit is {self.max_model_len}", param="input"
            )
        if max(prompt.token_ids) >= ByteTokenizer.vocab_size:
            raise RequestError(f"the input holds token id {max(prompt.token_ids)}; ids are 0 to 259", param="input")
        assert self.pooling is not None
        text = [token for token in prompt.token_ids if token < 256]
        vector = np.bincount(np.array(text, np.int64) % self.embedding_size, minlength=self.embedding_size)
        if self.pooling.num_scores:
            vector = np.full(self.pooling.num_scores, len(text) / 10)
        return RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=prompt.token_ids,
            outputs=[],
            finished=True,
            pooled=vector.astype("<f4").tobytes(),
        )

    async def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        output_kind: str = "delta",
        has_room: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        assert has_room
        if max(params.logprob_token_ids or (0,)) >= ByteTokenizer.vocab_size:
            raise RequestError("logprob_token_ids holds ids past 259", param="logprob_token_ids")
        if max(prompt) >= ByteTokenizer.vocab_size:
            raise RequestError(f"the prompt holds the token id {max(prompt)}; ids are 0 to 259", param="prompt")
        self.seen.append((prompt, params, request_id))
        self.callers.append(CALLER.get())
        if not self.state.alive:
            raise EngineDeadError("the engine is starting again; retry")
        if params.truncate_prompt_tokens:
            prompt = prompt[-params.truncate_prompt_tokens :]
        room = self.max_model_len - len(prompt)
        if room <= 0 or (params.max_tokens or 0) > room:
            raise PromptTooLongError(
                f"{len(prompt)} prompt tokens and {params.max_tokens} output tokens; the limit is {self.max_model_len}",
                param="max_tokens",
            )
        self.running.add(request_id)
        try:
            async for output in self._run(prompt, params, request_id, output_kind, room):
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise
        finally:
            self.running.discard(request_id)

    async def _run(
        self, prompt: list[int], params: SamplingParams, request_id: str, kind: str, room: int
    ) -> AsyncGenerator[RequestOutput, None]:
        limit = room if params.max_tokens is None else params.max_tokens
        spelled = self.script.encode()
        produced = list(itertools.islice(itertools.cycle(spelled), limit) if params.ignore_eos else spelled[:limit])
        ended = not params.ignore_eos and len(spelled) < limit
        tokens = produced + ([EOS] if ended else [])
        whole = [_Growing(index, params) for index in range(params.n)]

        def output(parts: list[CompletionOutput], finished: bool) -> RequestOutput:
            return RequestOutput(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=prompt,
                outputs=parts,
                prompt_logprobs=_prompt_candidates(prompt, params.prompt_logprobs),
                num_cached_tokens=len(prompt) // 16 * 16,
                finished=finished,
            )

        for position, token in enumerate(tokens):
            await self.gate.wait()
            await asyncio.sleep(0)
            if position == self.hold_after:
                await asyncio.Event().wait()
            if self.failure is not None and position >= self.fail_after:
                raise self.failure
            last = position == len(tokens) - 1
            reason = (FinishReason.STOP if ended else FinishReason.LENGTH) if last else None
            parts = [each.take(token, reason) for each in whole]
            if kind == "delta":
                yield output(parts, last)
        if not tokens:
            for each in whole:
                each.whole.finish_reason = FinishReason.LENGTH
            if kind == "delta":
                yield output([each.whole for each in whole], True)
        if kind == "final":
            yield output([each.whole for each in whole], True)


class _Growing:
    """One completion: bytes to whole characters, as the engine's detokenizer does."""

    def __init__(self, index: int, params: SamplingParams) -> None:
        self.params = params
        self.pending = b""
        listed: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.whole = CompletionOutput(
            index=index, text="", token_ids=[], logprobs=listed, cumulative_logprob=-1.0 * index
        )

    def take(self, token: int, reason: FinishReason | None) -> CompletionOutput:
        text = ""
        if token < 256:
            self.pending += bytes([token])
            try:
                text, self.pending = self.pending.decode(), b""
            except UnicodeDecodeError:
                text = ""
        if reason is not None:
            text += self.pending.decode("utf-8", "replace")
        self.whole.text += text
        self.whole.token_ids.append(token)
        self.whole.finish_reason = reason
        logprobs = None
        if self.params.logprobs is not None:
            shown = SPECIALS.get(token, text)
            logprobs = [_candidates(token, self.params.logprobs, shown, self.params.logprob_token_ids)]
            assert self.whole.logprobs is not None
            self.whole.logprobs += logprobs
        return CompletionOutput(
            index=self.whole.index, text=text, token_ids=[token], logprobs=logprobs, finish_reason=reason
        )


def _candidates(token: int, count: int, text: str, listed: Sequence[int] | None = None) -> dict[int, Logprob]:
    """The token's, and those of the best others or of what is ``listed``."""
    found = {token: Logprob(-0.5, 1, text)}
    if listed:
        return {other: Logprob(-2.0, 2, None) for other in listed} | found
    for rank in range(2, count + 1):
        other = (token + rank) % 256
        found[other] = Logprob(-float(rank) if rank < 3 else float("-inf"), rank, chr(other))
    return found


def _prompt_candidates(prompt: list[int], count: int | None) -> list[dict[int, Logprob] | None] | None:
    if count is None:
        return None
    tokenizer = ByteTokenizer()
    return [None, *[_candidates(token, count, tokenizer.id_to_token(token) or "") for token in prompt[1:]]]

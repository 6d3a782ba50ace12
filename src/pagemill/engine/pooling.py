"""Inputs and results of models that pool: texts and pairs of texts to token ids, vectors to embeddings and scores.

Owns truncation (nothing is cut unless asked for), what is done to a raw vector, and cosine similarity. Must not do I/O
or know asyncio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import PromptTooLongError, RequestError
from pagemill.model_config import PoolingConfig
from pagemill.models.tokenizer import Tokenizer
from pagemill.params import PoolingParams, RequestOutput

__all__ = [
    "Comparison",
    "PoolingPrompt",
    "PoolingTexts",
    "Vector",
    "check_classifies",
    "check_embeds",
    "check_generates",
    "check_pools",
    "class_scores",
    "embedding",
]

Vector = NDArray[np.float32]

MAX_PAIRS_CHARS = 2_000_000
"""Of all pairs of one request; a token takes some 180 bytes while pairs are tokenised."""


@dataclass(frozen=True, slots=True)
class PoolingPrompt:
    """One input, tokenised."""

    token_ids: list[int]
    second_segment: int | None = None
    """First token of the second of two texts."""


class PoolingTexts:
    """Turns what a caller sends into inputs of one model."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def inputs(
        self, given: Sequence[str | Sequence[int]], params: PoolingParams, *, add_special_tokens: bool = True
    ) -> list[PoolingPrompt]:
        """Texts and token ids, each cut to its first tokens if that is asked for. RequestError names an empty one."""
        limit = self._limit(params)
        for index, each in enumerate(given):
            if not each:
                which = f"input {index} is" if len(given) > 1 else "the input is"
                raise RequestError(f"{which} empty; send at least one character or token id", param="input")
        texts = [each for each in given if isinstance(each, str)]
        if limit is None:
            self._check_lengths(texts)
        encoded = iter(self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens) if texts else [])
        before, after = self._around() if add_special_tokens and limit is not None and texts else (0, 0)
        found = []
        for each in given:
            if isinstance(each, str):
                found.append(PoolingPrompt(_cut(next(encoded), limit, before, after)))
            else:
                found.append(PoolingPrompt(list(each[:limit])))
        return found

    def pairs(self, pairs: Sequence[tuple[str, str]], params: PoolingParams) -> list[PoolingPrompt]:
        """Two texts as one input each, for a cross-encoder. Where it is asked for, the second one is cut."""
        limit = self._limit(params)
        found = []
        for token_ids, begins, second in self._tokenizer.encode_pairs(pairs):
            if limit is not None and len(token_ids) > limit:
                if begins + 1 > limit:
                    raise PromptTooLongError(
                        f"the query alone has {begins} tokens, which leaves nothing of truncate_prompt_tokens={limit}"
                        " for the other text; shorten the query",
                        param="truncate_prompt_tokens",
                    )
                token_ids = [*token_ids[: limit - 1], token_ids[-1]]
            found.append(PoolingPrompt(token_ids, second))
        return found

    def _check_lengths(self, texts: Sequence[str]) -> None:
        """Refuse what is far too long before it is tokenised."""
        for text in texts:
            if len(text) > self._max_model_len:
                fewest = self._tokenizer.min_tokens(text)
                if fewest > self._max_model_len:
                    raise PromptTooLongError(
                        f"the input has {len(text)} characters, which are {fewest} tokens or more, and this model takes"
                        f" {self._max_model_len}; shorten it, or set truncate_prompt_tokens (-1: as many as fit)",
                        param="input",
                    )

    def _limit(self, params: PoolingParams) -> int | None:
        params.verify()
        limit = params.truncate_prompt_tokens
        if limit is not None and limit > self._max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens={limit} is more than this model's {self._max_model_len} tokens; use -1 for as"
                " many as fit",
                param="truncate_prompt_tokens",
            )
        return self._max_model_len if limit == -1 else limit

    def _around(self) -> tuple[int, int]:
        """How many special tokens the tokenizer puts before and after a text."""
        bare = self._tokenizer.encode("a", add_special_tokens=False)
        dressed = self._tokenizer.encode("a")
        extra = len(dressed) - len(bare)
        before = next((n for n in range(extra + 1) if dressed[n : n + len(bare)] == bare), 0)
        return before, extra - before


def _cut(token_ids: list[int], limit: int | None, before: int, after: int) -> list[int]:
    """The first ``limit`` tokens, the special ones around them kept."""
    if limit is None or len(token_ids) <= limit:
        return token_ids
    if limit <= before + after:
        raise RequestError(
            f"truncate_prompt_tokens={limit} has no room for text beside the model's {before + after} special tokens",
            param="truncate_prompt_tokens",
        )
    return token_ids[: limit - after] + token_ids[len(token_ids) - after :]


def check_generates(pooling: PoolingConfig | None) -> None:
    """Refuse a model that makes vectors."""
    if pooling is not None:
        raise RequestError(
            "this model makes vectors and no text; use /v1/embeddings, /rerank or /score (LLM.embed, LLM.score), or"
            " serve a model that generates"
        )


def check_pools(pooling: PoolingConfig | None) -> PoolingConfig:
    """Refuse a model that generates."""
    if pooling is None:
        raise RequestError(
            "this model generates text; start it with --runner=pooling for embeddings of its hidden states, or serve an"
            " embedding model, such as all-minilm-l6-v2"
        )
    return pooling


def check_embeds(pooling: PoolingConfig | None, params: PoolingParams, size: int) -> PoolingConfig:
    """Refuse what a model of ``size`` values does not give."""
    pooling = check_pools(pooling)
    if pooling.num_scores:
        raise RequestError(
            "this model classifies and makes no embeddings; use /classify, /score or /rerank (LLM.score)"
        )
    if params.dimensions is not None and params.dimensions > size:
        raise RequestError(
            f"dimensions={params.dimensions} is more than this model's {size}; ask for at most {size}",
            param="dimensions",
        )
    return pooling


def check_classifies(pooling: PoolingConfig | None) -> PoolingConfig:
    """Refuse a model that is no classifier."""
    pooling = check_pools(pooling)
    if not pooling.num_scores:
        raise RequestError("this model embeds and does not classify; use /v1/embeddings, or serve a classifier")
    return pooling


def class_scores(output: RequestOutput, pooling: PoolingConfig, *, activate: bool = True) -> Vector:
    """A classifier's outputs, float32 [num_scores]: probabilities, or the logits."""
    logits = _raw(output)
    if not activate or pooling.score_activation == "identity":
        return logits
    if pooling.score_activation == "sigmoid":
        return np.array([_sigmoid(float(logit)) for logit in logits], np.float32)
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return np.asarray(weights / weights.sum(), np.float32)


def embedding(output: RequestOutput, pooling: PoolingConfig, params: PoolingParams) -> Vector:
    """The vector as the caller wants it: float32 [dimensions]."""
    vector = _raw(output)[: params.dimensions]
    if not (pooling.normalize if params.normalize is None else params.normalize):
        return vector
    wide = vector.astype(np.float64)
    length = float(np.sqrt(wide @ wide))
    return (wide / length).astype(np.float32) if length > 0 else vector


class Comparison:
    """Texts that are scored against each other: one with many, or as many with as many.

    A model that embeds computes each text once and compares by cosine similarity; a cross-encoder reads both texts of a
    pair. ``names`` are the caller's words for the two sides.
    """

    def __init__(
        self, pooling: PoolingConfig | None, first: Sequence[str], second: Sequence[str], names: tuple[str, str]
    ) -> None:
        self._pooling = check_pools(pooling)
        if self._pooling.num_scores > 1:
            raise RequestError(
                f"this classifier has {self._pooling.num_scores} outputs; scoring needs a model with one"
            )
        for name, given in zip(names, (first, second), strict=True):
            if not given or not all(given):
                raise RequestError(f"{name} holds an empty text; send at least one character", param=name)
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"{names[0]} has {len(first)} texts and {names[1]} has {len(second)}; give one, or as many",
                param=names[0],
            )
        self._first, self._second = first, second

    @property
    def num_chars(self) -> int:
        """Size of the texts."""
        return sum(map(len, (*self._first, *self._second)))

    def inputs(self, texts: PoolingTexts, params: PoolingParams) -> list[PoolingPrompt]:
        """What the model must compute."""
        if not self._pooling.num_scores:
            return texts.inputs([*self._first, *self._second], params)
        first = self._first if len(self._first) > 1 else [self._first[0]] * len(self._second)
        size = sum(map(len, (*first, *self._second)))  # a query is tokenised once for each document
        if size > MAX_PAIRS_CHARS:
            raise RequestError(
                f"the pairs hold {size:,} characters; the most is {MAX_PAIRS_CHARS:,}; send fewer or shorter texts"
            )
        return texts.pairs(list(zip(first, self._second, strict=True)), params)

    def scores(self, outputs: Sequence[RequestOutput], *, activate: bool = True) -> list[float]:
        """One for each pair, of what was computed for ``inputs``."""
        if self._pooling.num_scores:
            return [_score(output, self._pooling, activate=activate) for output in outputs]
        vectors = [_raw(output) for output in outputs]
        left, right = vectors[: len(self._first)], vectors[len(self._first) :]
        return [_cosine(left[i if len(left) > 1 else 0], vector) for i, vector in enumerate(right)]


def _score(output: RequestOutput, pooling: PoolingConfig, *, activate: bool = True) -> float:
    """A cross-encoder's score: its logit, through what its configuration puts after it."""
    logit = float(_raw(output)[0])
    if not activate or pooling.score_activation == "identity":
        return logit
    return _sigmoid(logit)


def _sigmoid(logit: float) -> float:
    return float(1.0 / (1.0 + np.exp(-logit))) if logit >= 0 else float(np.exp(logit) / (1.0 + np.exp(logit)))


def _cosine(a: Vector, b: Vector) -> float:
    """Similarity of two embeddings, -1 to 1; 0 where one of them is zero."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    lengths = float(np.sqrt((wide_a @ wide_a) * (wide_b @ wide_b)))
    return float(wide_a @ wide_b) / lengths if lengths > 0 else 0.0


def _raw(output: RequestOutput) -> Vector:
    assert output.pooled is not None, "a pooling request that finished has a vector"
    return np.frombuffer(output.pooled, "<f4")

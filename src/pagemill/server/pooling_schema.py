"""The HTTP schema of embeddings, reranking and scoring: what requests look like, and what answers do.

Names are OpenAI's for embeddings, Jina's and Cohere's for reranking, vLLM's for scoring and for what goes beyond. Types
are strict; fields that are not known are kept and reported, as on the other routes. Answers are for the OpenAPI schema
and tests alone: handlers write JSON without going through them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from pagemill.params import PoolingParams
from pagemill.server.answer_schemas import UsageResponse
from pagemill.server.protocol import ID_CHARS, TokenId
from pagemill.server.structured import Model

__all__ = [
    "ClassifyRequest",
    "ClassifyResponse",
    "EmbeddingRequest",
    "EmbeddingResponse",
    "PoolRequest",
    "PoolResponse",
    "PoolingRequest",
    "RerankRequest",
    "RerankResponse",
    "ScoreRequest",
    "ScoreResponse",
]


class PoolingRequest(Model):
    """What all of them share."""

    model: str | None = Field(None, description="Served name; empty or absent means the default model.")
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep only this many of an input's first tokens; -1: as many as fit. Default: cut nothing."
    )
    truncation_side: Literal["right"] | None = Field(None, description="Inputs are cut at their end.")
    priority: int | None = Field(None, description="Lower goes first (with --scheduling-policy priority).")
    request_id: str | None = Field(None, max_length=128, pattern=ID_CHARS, description="Part of the answer's id.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Share cached prefixes only within this salt."
    )
    user: str | None = None


class EmbeddingRequest(PoolingRequest):
    """POST /v1/embeddings"""

    input: str | list[TokenId] | list[str] | list[list[TokenId]] = Field(
        description="Text, token ids, or a list of either."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: little-endian float32. Default float."
    )
    dimensions: int | None = Field(None, description="Keep the first so many values, scaled to length 1 again.")
    normalize: bool | None = Field(None, description="Scale to length 1. Default: as the model's files say (vLLM).")
    use_activation: bool | None = Field(None, description="vLLM's newer name for normalize.")
    embed_dtype: Literal["float32"] | None = Field(None, description="Of base64.")
    endianness: Literal["native", "little"] | None = Field(None, description="Of base64.")
    add_special_tokens: bool | None = Field(None, description="Add what the model wants around a text. Default true.")

    @property
    def params(self) -> PoolingParams:
        """As the engine has them."""
        return PoolingParams(
            dimensions=self.dimensions,
            normalize=self.use_activation if self.normalize is None else self.normalize,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class PoolRequest(EmbeddingRequest):
    """POST /pooling"""

    task: Literal["embed", "classify"] | None = Field(None, description="What the model does; it can be left out.")


class ClassifyRequest(PoolingRequest):
    """POST /classify"""

    input: str | list[TokenId] | list[str] | list[list[TokenId]] = Field(
        description="Text, token ids, or a list of either."
    )
    add_special_tokens: bool | None = Field(None, description="Add what the model wants around a text. Default true.")
    use_activation: bool | None = Field(None, description="false: the logits as they are (vLLM).")


class RerankText(Model):
    """A document as an object."""

    text: str


class RerankRequest(PoolingRequest):
    """POST /rerank, /v1/rerank, /v2/rerank"""

    query: str = Field(description="What is looked for.")
    documents: list[str | RerankText] = Field(min_length=1, description="Texts, or objects with a text.")
    top_n: int | None = Field(None, ge=0, description="Return only the best so many. Default and 0: all.")
    return_documents: bool | None = Field(None, description="Repeat the texts in the answer. Default true.")
    use_activation: bool | None = Field(None, description="false: a cross-encoder's logits as they are (vLLM).")


Texts = Annotated[list[str], Field(min_length=1)]


class ScoreRequest(PoolingRequest):
    """POST /score, /v1/score"""

    text_1: str | Texts = Field(description="One text, or one for each of text_2.")
    text_2: str | Texts = Field(description="Text or texts that it is compared with.")
    use_activation: bool | None = Field(None, description="false: a cross-encoder's logits as they are (vLLM).")


class EmbeddingItem(BaseModel):
    """One vector."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    """Answer of POST /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: UsageResponse


class PoolItem(BaseModel):
    """One vector, or a classifier's outputs."""

    object: Literal["pooling"]
    index: int
    data: list[float] | str


class PoolResponse(BaseModel):
    """Answer of POST /pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolItem]
    usage: UsageResponse


class ClassifyItem(BaseModel):
    """What one input is."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyResponse(BaseModel):
    """Answer of POST /classify."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifyItem]
    usage: UsageResponse


class RerankResult(BaseModel):
    """One document's place."""

    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RerankResponse(BaseModel):
    """Answer of POST /rerank: best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: UsageResponse


class ScoreItem(BaseModel):
    """One pair's score."""

    object: Literal["score"]
    index: int
    score: float


class ScoreResponse(BaseModel):
    """Answer of POST /score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItem]
    usage: UsageResponse

"""What each row wants from the sampler, as columns that live as long as the row.

Owns the sampling parameters of every row that the worker holds. A row is written once when its request arrives; a
step then only indexes the columns. Must not look at logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagemill.params import LOGPROBS_MODES, SamplingParams

__all__ = ["RowRequest", "SamplingTable"]

NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """A request as the sampler sees it when its row is filled."""

    params: SamplingParams
    seed: int
    token_ids: NDArray[np.int32]  # [num_tokens] prompt, then what was produced before a preemption
    num_prompt_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


class SamplingTable:
    """Columns by row, contiguous, of the widths that the native sampler reads."""

    def __init__(self, max_rows: int, logprobs_mode: str = "raw_logprobs") -> None:
        """``logprobs_mode``: of requests that name none."""
        self._default_mode = logprobs_mode
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int32)
        """0: off."""
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.repetition_penalty = np.ones(max_rows, np.float32)
        self.presence_penalty = np.zeros(max_rows, np.float32)
        self.frequency_penalty = np.zeros(max_rows, np.float32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.greedy = np.ones(max_rows, np.bool_)
        self.constrained = np.zeros(max_rows, np.bool_)
        """By a grammar."""
        self.num_logprobs = np.full(max_rows, NO_LOGPROBS, np.int32)
        """Candidates to report beside the chosen token; -1: none wanted."""
        self.logprobs_mode = np.zeros(max_rows, np.int8)
        """Place in :data:`~pagemill.params.LOGPROBS_MODES`."""
        self.logprob_token_ids: list[tuple[int, ...]] = [()] * max_rows
        """Tokens to report beside the chosen one, in place of candidates."""

    def set(self, row: int, request: RowRequest) -> None:
        """Fill a row."""
        params = request.params
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition_penalty[row] = params.repetition_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.seed[row] = request.seed % 2**64
        self.greedy[row] = params.greedy
        self.constrained[row] = params.structured_outputs is not None
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.logprobs_mode[row] = LOGPROBS_MODES.index(params.logprobs_mode or self._default_mode)
        self.logprob_token_ids[row] = params.logprob_token_ids or ()
        if params.logprob_token_ids:
            self.num_logprobs[row] = 0

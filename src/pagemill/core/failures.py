"""What a request is told that a step ended with an error.

Owns the words and whose fault it is. Must not end anything: the scheduler does.
"""

from __future__ import annotations

from pagemill.core.messages import EngineOutput
from pagemill.core.request import Request
from pagemill.errors import NonFiniteLogitsError, RequestError
from pagemill.params import FinishReason

__all__ = ["non_finite", "nothing_allowed"]

LIMITS = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens")
"""Parameters that forbid tokens."""


def non_finite(request: Request) -> EngineOutput:
    """The model's logits are not numbers."""
    what = "logits" if request.message.pooling == "none" else "values"
    return EngineOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=FinishReason.ERROR,
        error=f"the model produced NaN or infinite {what} at token {len(request.token_ids)} of this request",
        error_status=NonFiniteLogitsError.status,
    )


def nothing_allowed(request: Request) -> EngineOutput:
    """What the caller asked for forbids every token."""
    given = [name for name in LIMITS if getattr(request.message.params, name)] or ["its parameters"]
    return EngineOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=FinishReason.ERROR,
        error=(
            f"{' and '.join(given)} leave no token that may be output {request.num_output_tokens + 1} of this request;"
            " allow more, or leave one of them out"
        ),
        error_status=RequestError.status,
        error_param=given[0],
    )

"""A record of a request as the engine makes it, for the tests of those who write it down."""

from __future__ import annotations

from typing import Any

from pagemill.engine.caller import Caller
from pagemill.engine.record import RequestRecord
from pagemill.params import SamplingParams

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def record(**changed: Any) -> RequestRecord:
    caller = Caller(
        name="alice",
        route="/v1/chat/completions",
        address="127.0.0.1",
        trace=(("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"),),
    )
    values: dict[str, Any] = {
        "request_id": "chatcmpl-1",
        "caller": caller,
        "params": SamplingParams(max_tokens=7, temperature=0.5, top_p=0.9, n=2, seed=3),
        "streams": True,
        "ended_s": 1_700_000_010.5,
        "e2e_s": 2.5,
        "queue_s": 0.5,
        "first_token_s": 1.0,
        "prefill_s": 0.5,
        "decode_s": 1.5,
        "num_prompt_tokens": 11,
        "num_cached_tokens": 8,
        "num_output_tokens": 14,
        "num_preemptions": 1,
        "finish_reasons": ["stop", "length"],
        "error": None,
    }
    return RequestRecord(**values | changed)

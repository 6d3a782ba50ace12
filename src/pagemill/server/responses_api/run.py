"""One response in the making: the engine's outputs become items, events and the response object.

Owns the response object and its status. Whether somebody listens is the handlers' business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from pagemill.errors import EngineError, PagemillError, PromptTooLongError, QueueFullError, RequestError
from pagemill.params import CompletionOutput, FinishReason
from pagemill.server.chat import PreparedChat
from pagemill.server.context import ServerContext
from pagemill.server.generation import Usage, outputs
from pagemill.server.logprobs import chat_logprobs
from pagemill.server.offload import off_loop
from pagemill.server.parsers.deltas import Text
from pagemill.server.responses_api.items import new_id
from pagemill.server.responses_api.output import Event, OutputItems
from pagemill.server.responses_api.request import ResponsesRequest

logger = logging.getLogger("pagemill.server")

__all__ = ["ResponseRun", "response_object"]


def response_object(asked: ResponsesRequest, prepared: PreparedChat, model: str) -> dict[str, Any]:
    """The response before anything is produced, with what was asked for as it is understood."""
    params = prepared.job.params
    reasoning = asked.reasoning
    text = {} if asked.text is None else asked.text.model_dump(exclude_none=True)
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": bool(asked.background),
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "service_tier": "default",
        "store": asked.kept,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
        "tools": [_shown_tool(tool) for tool in asked.tools or ()],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": asked.truncation or "disabled",
    } | {
        name: value
        for name in ("user", "safety_identifier", "prompt_cache_key")
        if (value := getattr(asked, name)) is not None
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": False} | {name: value for name, value in tool.items() if value is not None}


class ResponseRun:
    """Produces one response, once, by :meth:`whole` or by :meth:`events`."""

    def __init__(
        self, context: ServerContext, asked: ResponsesRequest, prepared: PreparedChat, response: dict[str, Any]
    ) -> None:
        self.response = response
        """Kept up to date."""
        self._context = context
        self._job = prepared.job
        (self._parser,) = prepared.parsers
        self._top_logprobs = asked.top_logprobs or 0
        self._items = OutputItems()
        self._usage = Usage()
        self._reason: FinishReason | None = None
        self._number = 0

    async def whole(self) -> dict[str, Any]:
        """The finished response; raises what went wrong."""
        async with aclosing(self._produced("final")) as produced:
            async for _ in produced:
                pass
        await self._finish()
        return self.response

    async def events(self, *, opened: bool) -> AsyncGenerator[list[bytes], None]:
        """The events, some at a time; the response is finished before the last one is given.

        ``opened``: begin at once, and end in a failed response whatever happens. Otherwise nothing is given before the
        engine has taken the request, so that a refusal can have its own status.
        """
        if opened:
            yield self._opening()
        try:
            async with aclosing(self._produced("delta")) as produced:
                async for events in produced:
                    if not opened:
                        opened = True
                        yield self._opening()
                    if events:
                        yield [self._encoded(event) for event in events]
            last = await self._finish()
        except Exception as error:
            if not opened:
                raise
            if not isinstance(error, PagemillError):
                logger.exception("a response failed")
            last = [*self._items.finish("incomplete"), self._failed(error)]
        yield [self._encoded(event) for event in last]

    def cancel(self) -> None:
        """It was stopped from outside: what there is stays."""
        self._items.finish("incomplete")
        self.response |= {"status": "cancelled", "output": self._items.items}

    def _opening(self) -> list[bytes]:
        told = (
            ["created", "queued", "in_progress"] if self.response["status"] == "queued" else ["created", "in_progress"]
        )
        events = []
        for name in told:
            if name != "created":
                self.response["status"] = name
            events.append(self._encoded({"type": f"response.{name}", "response": self.response}))
        return events

    async def _produced(self, kind: str) -> AsyncGenerator[list[Event], None]:
        async with aclosing(outputs(self._context.engine, self._context.admission, self._job, kind)) as stream:
            async for _, output in stream:
                self._usage.see(0, output)
                for completion in output.outputs:
                    yield await self._taken(completion)

    async def _taken(self, completion: CompletionOutput) -> list[Event]:
        if completion.finish_reason is FinishReason.ERROR:
            raise EngineError(completion.error or "the engine failed on this request")
        self._reason = completion.finish_reason
        self._usage.completion_tokens += len(completion.token_ids)
        if completion.logprobs is not None:
            found = chat_logprobs(
                completion.logprobs, completion.token_ids, self._top_logprobs, self._context.engine.tokenizer
            )
            self._items.add_logprobs(found["content"])
        text, parser = completion.text, self._parser
        if parser is None:
            return self._items.take([Text(text)] if text else [])
        deltas = await off_loop(len(text), lambda: parser.feed(text)) if text else []
        if completion.finish_reason is not None:
            deltas += parser.finish()
        return self._items.take(deltas)

    async def _finish(self) -> list[Event]:
        """Close the items and the response."""
        if self._reason is FinishReason.ABORT or self._reason is None:
            raise EngineError("the request was stopped before it was finished")
        cut = self._reason is FinishReason.LENGTH
        events = self._items.finish("incomplete" if cut else "completed")
        status = "incomplete" if cut else "completed"
        self.response |= {
            "status": status,
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items.items,
            "usage": await self._counted(),
        }
        return [*events, {"type": f"response.{status}", "response": self.response}]

    async def _counted(self) -> dict[str, Any]:
        counts = self._usage.as_dict()
        thought = self._items.reasoning
        thinking = len(await self._context.encode(thought, add_special_tokens=False)) if thought else 0
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": min(thinking, counts["completion_tokens"])},
            "total_tokens": counts["total_tokens"],
        }

    def _failed(self, error: Exception) -> Event:
        known = isinstance(error, PagemillError)
        code = "server_error"
        if isinstance(error, QueueFullError):
            code = "rate_limit_exceeded"
        elif isinstance(error, PromptTooLongError | RequestError):
            code = "invalid_prompt"
        message = str(error) if known else "internal error; the server's log has the details"
        self.response |= {
            "status": "failed",
            "error": {"code": code, "message": message},
            "output": self._items.items,
        }
        return {"type": "response.failed", "response": self.response}

    def _encoded(self, event: Event) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))

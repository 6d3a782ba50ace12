"""POST /v1/chat/completions, whole and streamed.

Owns the response's shape: messages, deltas (the role first, then text, then the reason), logprobs. The template is the
context's business, and finding tool calls and reasoning in the text the parsers'.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagemill.errors import EngineError, RequestError
from pagemill.params import (
    CompletionOutput,
    FinishReason,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from pagemill.server.body import unless_gone
from pagemill.server.context import ServerContext, chat_messages, json_response, text_of
from pagemill.server.generation import Job, Prompt, Usage, outputs, response_id
from pagemill.server.logprobs import chat_logprobs, prompt_logprobs
from pagemill.server.offload import off_loop
from pagemill.server.parsers.answer import AnswerParser, Message, delta_fields
from pagemill.server.parsers.deltas import Delta
from pagemill.server.protocol import ChatCompletionRequest, answer_headers
from pagemill.server.sse import ChunkWriter, EventStream
from pagemill.server.structured import constrained_by, writes_json, writes_tags
from pagemill.server.tools import NO_TOOLS

__all__ = ["PreparedChat", "create_chat_completion", "prepare_chat"]


@dataclass(slots=True)
class PreparedChat:
    """A conversation, ready to be answered."""

    job: Job
    parsers: list[AnswerParser | None]
    """One for each choice; None where the text is the content."""


async def prepare_chat(
    context: ServerContext, asked: ChatCompletionRequest, *, refuse_long: bool = True
) -> PreparedChat:
    """Check, render, tokenise. Raises RequestError; with ``refuse_long`` before it tokenises what cannot fit."""
    params = asked.sampling_params(context.defaults)
    text = await context.render_chat(asked)
    if refuse_long:
        context.check_length(text, params)
    use, formats = asked.tool_use, context.formats_for(asked)
    if use.mode == "auto" and not context.config.enable_auto_tool_choice:
        use = NO_TOOLS
    tags = None if asked.use_beam_search else formats.tags(use, context.special_tokens)
    by_tools = use.forced or params.structured_outputs is None
    params, bound = _constrained(params, formats.thought(text, context.special_tokens), tags)
    if formats.needs_special(use, bound=bound):
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    token_ids = await context.encode(text, add_special_tokens=bool(asked.add_special_tokens))
    if not token_ids:
        raise RequestError("the messages render to nothing, and the prompt cannot be empty", param="messages")
    job = Job(
        [Prompt(token_ids, text)],
        params,
        response_id("chatcmpl", asked.request_id),
        priority=asked.priority or 0,
        cache_salt=asked.cache_salt,
        constraint="tools" if by_tools else constrained_by(asked),
        beams=asked.beams(params),
    )
    return PreparedChat(job, [formats.parser(text, use, bound=bound) for _ in range(params.n)])


def _constrained(
    params: SamplingParams, thought: tuple[str, str] | None, tags: dict[str, Any] | None
) -> tuple[SamplingParams, bool]:
    """With a thought before JSON where the model thinks, and calls of strict functions kept to their schemas.

    And whether the output is JSON from its first character on.
    """
    structured = params.structured_outputs
    if structured is None and tags is not None and params.allowed_token_ids is None:
        structured = StructuredOutputsParams(structural_tag=tags, thought=thought)
    elif structured is not None and (writes_json(params) or writes_tags(params)):
        thought = structured.thought or thought
        structured = msgspec.structs.replace(structured, thought=thought)
    return msgspec.structs.replace(params, structured_outputs=structured), writes_json(params) and thought is None


async def create_chat_completion(context: ServerContext, request: Request) -> Response:
    """Read, check, render, tokenise; then answer whole or as a stream."""
    asked = await context.read(request, ChatCompletionRequest)
    context.check_model(asked.model)
    prepared = await prepare_chat(context, asked)
    headers = answer_headers(prepared.job.request_id, asked)
    answer = _Answer(context, asked, prepared)
    if asked.stream:
        return EventStream(answer.events(), headers)
    return json_response(await unless_gone(request.receive, answer.whole()), headers)


class _Answer:
    """One response in the making."""

    def __init__(self, context: ServerContext, asked: ChatCompletionRequest, prepared: PreparedChat) -> None:
        self.context = context
        self.asked = asked
        self.job = prepared.job
        self.parsers = prepared.parsers
        self.created = int(time.time())
        self.usage = Usage()
        self.as_ids = context.tokens_as_ids(asked.return_tokens_as_token_ids)
        self.role, self.echoed = _answering_role(asked)

    async def whole(self) -> dict[str, Any]:
        """The whole response."""
        result: RequestOutput | None = None
        async with aclosing(outputs(self.context.engine, self.context.admission, self.job, "final")) as stream:
            async for _, output in stream:
                result = output
        if result is None:
            raise EngineError("the engine ended the request without an answer")
        self.usage.see(0, result)
        choices = []
        for completion in sorted(result.outputs, key=lambda each: each.index):
            _raise_if_failed(completion)
            self.usage.completion_tokens += len(completion.token_ids)
            choice = {
                "index": completion.index,
                "message": await self._message(completion),
                "logprobs": self._logprobs(completion),
                "finish_reason": self._reason(completion),
                "stop_reason": completion.stop_reason,
            }
            if self.asked.return_token_ids:
                choice["token_ids"] = completion.token_ids
            choices.append(choice)
        answer: dict[str, Any] = {
            "id": self.job.request_id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.context.model_name,
            "choices": choices,
            "usage": self.usage.as_dict(),
        }
        if result.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
        if self.asked.return_token_ids:
            answer["prompt_token_ids"] = result.prompt_token_ids
        return answer

    async def _message(self, completion: CompletionOutput) -> dict[str, Any]:
        parser = self.parsers[completion.index]
        if parser is None:
            return {"role": self.role, "content": self.echoed + completion.text, "refusal": None}
        text = completion.text
        deltas = await off_loop(len(text), lambda: parser.feed(text) + parser.finish())
        message = Message()
        message.add(deltas)
        return message.as_dict(self.role, self.echoed, include_reasoning=self.asked.include_reasoning is not False)

    def _reason(self, completion: CompletionOutput) -> str | None:
        """A call that was read is the reason, unless the answer was cut; one that was named ends with stop (OpenAI)."""
        parser = self.parsers[completion.index]
        called = parser is not None and parser.called and self.asked.tool_use.mode != "named"
        if called and completion.finish_reason is FinishReason.STOP:
            return "tool_calls"
        return None if completion.finish_reason is None else completion.finish_reason.value

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        found = completion.logprobs or []
        token_ids = completion.token_ids if found else []
        return chat_logprobs(
            found,
            token_ids,
            self.asked.top_logprobs or 0,
            self.context.engine.tokenizer,
            listed=self.asked.logprob_token_ids or (),
            as_ids=self.as_ids,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events."""
        asked = self.asked
        writer = ChunkWriter(
            "chat", self.job.request_id, self.created, self.context.model_name, usage_null=asked.include_usage
        )
        plain = not asked.logprobs and not asked.continuous_usage and not asked.return_token_ids
        opened = False
        stream = outputs(self.context.engine, self.context.admission, self.job, "delta")
        async with aclosing(stream):
            async for _, output in stream:
                self.usage.see(0, output)
                pieces = [] if opened else self._openings(writer, output)
                opened = True
                for completion in output.outputs:
                    _raise_if_failed(completion)
                    self.usage.completion_tokens += len(completion.token_ids)
                    parser = self.parsers[completion.index]
                    if parser is not None:
                        pieces += self._parsed(writer, completion, parser)
                    elif not plain and (completion.text or completion.token_ids):
                        pieces.append(self._detailed(writer, completion))
                    elif completion.text:
                        pieces.append(writer.text(completion.index, completion.text))
                    if completion.finish_reason is not None:
                        pieces.append(self._closing(writer, completion))
                if pieces:
                    yield pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if asked.include_usage:
            yield writer.usage(self.usage.as_dict())

    def _openings(self, writer: ChunkWriter, output: RequestOutput) -> list[bytes]:
        """The role of every choice, before any text; then what echo repeats."""
        beside: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if self.asked.return_token_ids else {}
        if output.prompt_logprobs is not None:
            beside["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        pieces = [
            writer.choice(
                index,
                {"role": self.role, "content": ""},
                usage=self._running_usage(),
                beside=None if index else beside,
            )
            for index in range(self.job.params.n)
        ]
        if self.echoed:
            pieces += [writer.text(index, self.echoed) for index in range(self.job.params.n)]
        return pieces

    def _parsed(self, writer: ChunkWriter, completion: CompletionOutput, parser: AnswerParser) -> list[bytes]:
        """An event for each delta; logprobs and ids go with the first, which is empty where the text is held back."""
        deltas = parser.feed(completion.text) if completion.text else []
        if completion.finish_reason is not None:
            deltas += parser.finish()
        fields = [each for each in map(self._delta, deltas) if each]
        detailed = bool(completion.token_ids) and (self.asked.logprobs or self.asked.return_token_ids)
        if detailed and not fields:
            fields.append({})
        pieces = []
        for at, delta in enumerate(fields):
            first = detailed and not at
            pieces.append(
                writer.choice(
                    completion.index,
                    delta,
                    logprobs=self._logprobs(completion) if first else None,
                    extra={"token_ids": completion.token_ids} if first and self.asked.return_token_ids else None,
                    usage=self._running_usage(),
                )
            )
        return pieces

    def _delta(self, delta: Delta) -> dict[str, Any]:
        return delta_fields(delta, include_reasoning=self.asked.include_reasoning is not False)

    def _detailed(self, writer: ChunkWriter, completion: CompletionOutput) -> bytes:
        extra = {"token_ids": completion.token_ids} if self.asked.return_token_ids else None
        return writer.choice(
            completion.index,
            {"content": completion.text},
            logprobs=self._logprobs(completion),
            extra=extra,
            usage=self._running_usage(),
        )

    def _closing(self, writer: ChunkWriter, completion: CompletionOutput) -> bytes:
        return writer.choice(
            completion.index,
            {},
            finish_reason=self._reason(completion),
            extra={"stop_reason": completion.stop_reason},
            usage=self._running_usage(),
        )

    def _running_usage(self) -> dict[str, Any] | None:
        return self.usage.as_dict() if self.asked.continuous_usage else None


def _answering_role(asked: ChatCompletionRequest) -> tuple[str, str]:
    """Whose turn the answer is, and with echo the text of the message that it goes on with."""
    last = chat_messages(asked)[-1]
    if not asked.continue_final_message:
        return "assistant", ""
    return str(last["role"]), text_of(last) if asked.echo else ""


def _raise_if_failed(completion: CompletionOutput) -> None:
    if completion.finish_reason is FinishReason.ERROR:
        raise EngineError(completion.error or "the engine failed on this request")

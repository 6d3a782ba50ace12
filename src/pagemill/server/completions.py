"""POST /v1/completions, whole and streamed.

Owns how prompts are read (text, token ids, lists of either), echo, best_of, and the response's shape.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagemill.errors import EngineError, RequestError
from pagemill.params import CompletionOutput, FinishReason, RequestOutput, SamplingParams
from pagemill.server.body import unless_gone
from pagemill.server.context import ServerContext, json_response
from pagemill.server.generation import Job, Prompt, Usage, outputs, response_id
from pagemill.server.logprobs import TokenTexts, completion_logprobs, prompt_logprobs
from pagemill.server.offload import off_loop
from pagemill.server.protocol import CompletionRequest, answer_headers
from pagemill.server.sse import ChunkWriter, EventStream
from pagemill.server.structured import constrained_by

__all__ = ["create_completion"]


async def create_completion(context: ServerContext, request: Request) -> Response:
    """Read, check, tokenise; then answer whole or as a stream."""
    asked = await context.read(request, CompletionRequest)
    context.check_model(asked.model)
    params = asked.sampling_params(context.defaults)
    prompts = await read_prompts(context, asked, params)
    job = Job(
        prompts,
        params,
        response_id("cmpl", asked.request_id),
        priority=asked.priority or 0,
        cache_salt=asked.cache_salt,
        constraint=constrained_by(asked),
        beams=asked.beams(params),
    )
    headers = answer_headers(job.request_id, asked)
    answer = _Answer(context, asked, job)
    if asked.stream:
        return EventStream(answer.events(), headers)
    return json_response(await unless_gone(request.receive, answer.whole()), headers)


async def read_prompts(context: ServerContext, asked: CompletionRequest, params: SamplingParams) -> list[Prompt]:
    """One entry per prompt; raises RequestError for an empty one."""
    given = asked.prompt
    if not given:
        raise RequestError("prompt is empty; send text or at least one token id", param="prompt")
    singles: list[Any]
    singles = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
    if len(singles) * params.n > context.admission.limit:
        raise RequestError(
            f"prompt has {len(singles)} entries with n={params.n}; the limit is {context.admission.limit} sequences "
            "(the server's --max-num-queued-reqs)",
            param="prompt",
        )
    add_special = True if asked.add_special_tokens is None else asked.add_special_tokens
    tokenizer = context.engine.tokenizer

    def encode_all() -> list[Prompt]:
        return [
            Prompt(tokenizer.encode(single, add_special_tokens=add_special), single)
            if isinstance(single, str)
            else Prompt(single)
            for single in singles
        ]

    for single in singles:
        if isinstance(single, str):
            context.check_length(single, params)
    chars = sum(len(single) for single in singles if isinstance(single, str))
    prompts = await off_loop(chars, encode_all)
    for single, prompt in zip(singles, prompts, strict=True):
        if not prompt.token_ids or single == "":
            raise RequestError("prompt is empty; send text or at least one token id", param="prompt")
    return prompts


class _Answer:
    """One response in the making."""

    def __init__(self, context: ServerContext, asked: CompletionRequest, job: Job) -> None:
        self.context = context
        self.asked = asked
        self.job = job
        self.created = int(time.time())
        self.n = 1 if asked.n is None else asked.n
        self.usage = Usage()
        self.as_ids = context.tokens_as_ids(asked.return_tokens_as_token_ids)
        self._texts: dict[int, TokenTexts] = {}

    async def whole(self) -> dict[str, Any]:
        """The whole response."""
        results: dict[int, RequestOutput] = {}
        async with aclosing(outputs(self.context.engine, self.context.admission, self.job, "final")) as stream:
            async for index, output in stream:
                results[index] = output
                self.usage.see(index, output)
        choices = []
        for prompt_index in sorted(results):
            output = results[prompt_index]
            self.usage.completion_tokens += sum(len(each.token_ids) for each in output.outputs)
            for place, completion in enumerate(self._best(output.outputs)):
                choices.append(self._choice(prompt_index, place, output, completion))
        return {
            "id": self.job.request_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.context.model_name,
            "choices": choices,
            "usage": self.usage.as_dict(),
        }

    def _best(self, completions: list[CompletionOutput]) -> list[CompletionOutput]:
        """The n most probable per token, or all of them in order."""
        for completion in completions:
            if completion.finish_reason is FinishReason.ERROR:
                raise EngineError(completion.error or "the engine failed on this request")
        ordered = sorted(completions, key=lambda each: each.index)
        if len(ordered) > self.n:
            ordered.sort(key=lambda each: -(each.cumulative_logprob or 0.0) / max(1, len(each.token_ids)))
        return ordered[: self.n]

    def _choice(
        self, prompt_index: int, place: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        text = completion.text
        if self.asked.echo:
            text = self._prompt_text(prompt_index, output) + text
        choice_index = prompt_index * self.n + place
        logprobs = None
        if self.asked.logprobs is not None:
            logprobs = self._logprobs(choice_index, prompt_index, output, completion)
        choice = {
            "index": choice_index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": _reason(completion),
            "stop_reason": completion.stop_reason,
        }
        if output.prompt_logprobs is not None and self.asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.asked.return_token_ids:
            choice |= {"token_ids": completion.token_ids, "prompt_token_ids": output.prompt_token_ids}
        return choice

    def _prompt_text(self, prompt_index: int, output: RequestOutput) -> str:
        text = self.job.prompts[prompt_index].text
        if text is not None and self.job.params.truncate_prompt_tokens is None:
            return text
        return self.context.engine.tokenizer.decode(
            output.prompt_token_ids, skip_special_tokens=self.job.params.skip_special_tokens
        )

    def _logprobs(
        self, choice_index: int, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        """Columns for the tokens in ``completion``, before them the prompt's when echo shows it for the first time."""
        texts = self._texts.get(choice_index)
        columns: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        tokenizer = self.context.engine.tokenizer
        if texts is None:
            texts = TokenTexts(tokenizer, skip_special_tokens=self.job.params.skip_special_tokens)
            self._texts[choice_index] = texts
            if self.asked.echo:
                shown = texts.of_prompt(output.prompt_token_ids, self._prompt_text(prompt_index, output))
                known = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
                columns = completion_logprobs(known, output.prompt_token_ids, shown, as_ids=self.as_ids)
        produced = completion_logprobs(
            completion.logprobs or [],
            completion.token_ids if completion.logprobs else [],
            texts.of_output(completion.token_ids, completion.logprobs or []),
            as_ids=self.as_ids,
        )
        return {name: columns[name] + produced[name] for name in columns}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events."""
        asked = self.asked
        writer = ChunkWriter(
            "text", self.job.request_id, self.created, self.context.model_name, usage_null=asked.include_usage
        )
        plain = asked.logprobs is None and asked.prompt_logprobs is None
        plain = plain and not asked.continuous_usage and not asked.return_token_ids
        opened: set[int] = set()
        stream = outputs(self.context.engine, self.context.admission, self.job, "delta")
        async with aclosing(stream):
            async for prompt_index, output in stream:
                self.usage.see(prompt_index, output)
                pieces = []
                for completion in output.outputs:
                    self.usage.completion_tokens += len(completion.token_ids)
                    choice_index = prompt_index * self.n + completion.index
                    if plain and completion.finish_reason is None and (choice_index in opened or not asked.echo):
                        if completion.text:
                            pieces.append(writer.text(choice_index, completion.text))
                        continue
                    piece = self._event(writer, prompt_index, output, completion, first=choice_index not in opened)
                    opened.add(choice_index)
                    pieces.append(piece)
                if pieces:
                    yield pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if asked.include_usage:
            yield writer.usage(self.usage.as_dict())

    def _event(
        self,
        writer: ChunkWriter,
        prompt_index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        *,
        first: bool,
    ) -> bytes:
        """An event with more than text: the first with echo, the last, or one with logprobs, usage or ids."""
        if completion.finish_reason is FinishReason.ERROR:
            raise EngineError(completion.error or "the engine failed on this request")
        asked = self.asked
        choice_index = prompt_index * self.n + completion.index
        text = completion.text
        if first and asked.echo:
            text = self._prompt_text(prompt_index, output) + text
        logprobs = None
        if asked.logprobs is not None:
            logprobs = self._logprobs(choice_index, prompt_index, output, completion)
        extra: dict[str, Any] = {}
        if completion.finish_reason is not None:
            extra["stop_reason"] = completion.stop_reason
        if asked.return_token_ids:
            extra["token_ids"] = completion.token_ids
            if first:
                extra["prompt_token_ids"] = output.prompt_token_ids
        if first and asked.prompt_logprobs is not None and output.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return writer.choice(
            choice_index,
            text,
            logprobs=logprobs,
            finish_reason=_reason(completion),
            extra=extra,
            usage=self.usage.as_dict() if asked.continuous_usage else None,
        )


def _reason(completion: CompletionOutput) -> str | None:
    return None if completion.finish_reason is None else completion.finish_reason.value

"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them: the tokens that a request with this text would use."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pagemill.errors import PayloadTooLargeError, RequestError
from pagemill.server.context import ServerContext, json_response
from pagemill.server.offload import off_loop
from pagemill.server.protocol import DetokenizeRequest, TokenizeRequest

__all__ = ["detokenize", "tokenize", "tokenizer_info"]

MAX_CHARS = 1 << 20
"""Of a text. Each may be a token, and what is made of a million of them holds everybody up for a few hundredths of a
second."""


async def tokenize(context: ServerContext, request: Request) -> Response:
    """Text or messages -> token ids and their number."""
    asked = await context.read(request, TokenizeRequest)
    context.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if asked.prompt is not None:
        text = asked.prompt
        add_special = True if asked.add_special_tokens is None else asked.add_special_tokens
    else:
        text = await context.render_chat(asked)
        add_special = bool(asked.add_special_tokens)
    if len(text) > MAX_CHARS:
        raise PayloadTooLargeError(
            f"the text has {len(text):,} characters; the most is {MAX_CHARS:,}; send it in pieces, cut between words"
        )
    tokens = await context.encode(text, add_special_tokens=add_special)
    strings = None
    if asked.return_token_strs:
        tokenizer = context.engine.tokenizer
        strings = await off_loop(4 * len(tokens), lambda: [tokenizer.id_to_token(token) or "" for token in tokens])
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": context.engine.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }
    )


async def detokenize(context: ServerContext, request: Request) -> Response:
    """Token ids -> text, special tokens shown."""
    asked = await context.read(request, DetokenizeRequest)
    context.check_model(asked.model)
    tokenizer = context.engine.tokenizer
    if asked.tokens and max(asked.tokens) >= tokenizer.vocab_size:
        raise RequestError(
            f"tokens holds the token id {max(asked.tokens)}; this model's ids are 0 to {tokenizer.vocab_size - 1}",
            param="tokens",
        )
    text = await off_loop(4 * len(asked.tokens), lambda: tokenizer.decode(asked.tokens, skip_special_tokens=False))
    return json_response({"prompt": text})


async def tokenizer_info(context: ServerContext, request: Request) -> Response:
    """The special tokens, for clients that tokenise here (lm-evaluation-harness asks)."""
    tokenizer = context.engine.tokenizer
    special = tokenizer.special_tokens
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    shown: dict[str, str | int | None] = {name: special.get(name) for name in names}
    shown |= {"vocab_size": tokenizer.vocab_size, "model_max_length": context.engine.max_model_len}
    return json_response(shown)

"""LlamaIndex: complete, chat, streams, async, a typed answer and a tool call."""

import asyncio
import os

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class River(BaseModel):
    """A river."""

    name: str = Field(max_length=20)
    km: int


def multiply(first: int, second: int) -> int:
    """Multiply two numbers."""
    return first * second


def main() -> None:
    given = {
        "model": os.environ["PAGEMILL_MODEL"],
        "api_base": os.environ["OPENAI_BASE_URL"],
        "api_key": "none",
        "temperature": 0,
        "is_chat_model": True,
        "is_function_calling_model": True,
        "context_window": 4096,
    }
    model = OpenAILike(**given, max_tokens=24)
    turns = [ChatMessage(role="system", content="You are brief."), ChatMessage(role="user", content="Name a river.")]
    text = model.chat(turns).message.content
    assert text
    assert "".join(part.delta or "" for part in model.stream_chat(turns)) == text

    async def asynchronous() -> str:
        return "".join([part.delta or "" async for part in await model.astream_chat(turns)])

    assert asyncio.run(asynchronous()) == text
    turns += [ChatMessage(role="assistant", content=text), ChatMessage(role="user", content="And another?")]
    assert model.chat(turns).message.content
    base = OpenAILike(**given | {"is_chat_model": False}, max_tokens=6)
    assert base.complete("One, two, three,").text

    long = OpenAILike(**given, max_tokens=200)
    assert isinstance(long.structured_predict(River, PromptTemplate("Describe a river.")), River)
    tool = FunctionTool.from_defaults(fn=multiply)
    answer = long.chat_with_tools([tool], user_msg="What is 6 times 7?", tool_required=True)
    calls = long.get_tool_calls_from_response(answer)
    assert calls[0].tool_name == "multiply"
    assert set(calls[0].tool_kwargs) == {"first", "second"}


main()

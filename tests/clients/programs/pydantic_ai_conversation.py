"""Pydantic AI: an agent with a typed answer, one with a tool, a stream, and a conversation that goes on."""

import asyncio
import os

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Town(BaseModel):
    """A town."""

    name: str = Field(max_length=20)
    people: int


async def main() -> None:
    provider = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
    model = OpenAIChatModel(os.environ["PAGEMILL_MODEL"], provider=provider)
    brief = ModelSettings(temperature=0, max_tokens=24)
    talker = Agent(model, instructions="You are brief.", model_settings=brief)
    first = await talker.run("Name a town.")
    assert first.output
    second = await talker.run("And another?", message_history=first.all_messages())
    assert second.output
    assert second.usage.input_tokens > first.usage.input_tokens
    async with talker.run_stream("Name a town.") as stream:
        parts = [part async for part in stream.stream_text(delta=True)]
    assert "".join(parts) == first.output

    long = ModelSettings(temperature=0, max_tokens=200)
    for wanted in (NativeOutput(Town, strict=True), ToolOutput(Town)):
        answered = await Agent(model, output_type=wanted, model_settings=long).run("Describe a town.")
        assert isinstance(answered.output, Town)


asyncio.run(main())

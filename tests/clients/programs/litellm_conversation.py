"""LiteLLM: a completion, a stream, an async one, JSON by schema, a tool call, embeddings' errors as its own kinds."""

import asyncio
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the internet for prices first
import litellm

NAME = "openai/" + os.environ["PAGEMILL_MODEL"]
ASK: Any = {
    "model": NAME,
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 24,
    "messages": [{"role": "user", "content": "Name three rivers."}],
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 12}},
            "required": ["word"],
        },
    },
}
SCHEMA: Any = {
    "type": "object",
    "properties": {"river": {"type": "string", "maxLength": 20}, "km": {"type": "integer"}},
    "required": ["river", "km"],
    "additionalProperties": False,
}


async def asynchronous() -> str:
    text = ""
    async for chunk in await litellm.acompletion(**ASK, stream=True):
        text += chunk.choices[0].delta.content or ""
    return text


def main() -> None:
    whole = litellm.completion(**ASK)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens <= 24
    streamed = list(litellm.completion(**ASK, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == text
    assert asyncio.run(asynchronous()) == text

    wanted = {"type": "json_schema", "json_schema": {"name": "river", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(**ASK | {"max_tokens": 100}, response_format=wanted)
    assert set(json.loads(answer.choices[0].message.content)) == {"river", "km"}

    called = litellm.completion(**ASK | {"max_tokens": 100}, tools=[TOOL], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls[:1]
    assert call.function.name == "look_up"
    turns = [*ASK["messages"], called.choices[0].message.model_dump()]
    turns += [
        {"role": "tool", "tool_call_id": each.id, "content": "a river"} for each in called.choices[0].message.tool_calls
    ]
    assert litellm.completion(**ASK | {"messages": turns}).choices[0].message.content

    text_completion = litellm.text_completion(
        model="text-completion-" + NAME, prompt="One, two,", max_tokens=4, temperature=0,
        api_base=ASK["api_base"], api_key="none",
    )  # fmt: skip
    assert text_completion.choices[0].text
    try:
        litellm.completion(**ASK | {"model": "openai/another"})
    except litellm.NotFoundError as error:
        if "another" not in str(error):
            raise
    else:
        raise AssertionError("an unknown model was served")


main()

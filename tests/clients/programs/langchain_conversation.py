"""LangChain: a prompt template, a chain, streams, batches, a typed answer, an agent's tool call."""

import asyncio
import os
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

MODEL = os.environ["PAGEMILL_MODEL"]


class Animal(BaseModel):
    """An animal."""

    name: str = Field(max_length=20)
    legs: Literal[0, 2, 4, 6, 8]


@tool
def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


def main() -> None:
    model = ChatOpenAI(model=MODEL, temperature=0, max_completion_tokens=24, seed=1)
    prompt = ChatPromptTemplate.from_messages([("system", "You are brief."), ("user", "Tell me about {what}.")])
    chain = prompt | model | StrOutputParser()
    text = chain.invoke({"what": "rivers"})
    assert text
    assert "".join(chain.stream({"what": "rivers"})) == text
    assert chain.batch([{"what": "rivers"}, {"what": "hills"}])[0] == text
    assert asyncio.run(chain.ainvoke({"what": "rivers"})) == text

    long = ChatOpenAI(model=MODEL, temperature=0, max_completion_tokens=200)
    for method in ("json_schema", "function_calling"):
        animal = long.with_structured_output(Animal, method=method).invoke("Describe a spider.")
        assert isinstance(animal, Animal)

    turns: list[Any] = [HumanMessage("What is 3 + 4?")]
    asked = long.bind_tools([add], tool_choice="add")
    called = asked.invoke(turns)
    (call,) = called.tool_calls
    assert set(call["args"]) == {"first", "second"}
    turns += [called, ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])]
    last = model.invoke(turns)
    assert last.content
    assert last.usage_metadata["total_tokens"] > 0
    whole = None
    for chunk in asked.stream(turns[:1]):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == call["args"]

    scored = model.bind(logprobs=True, top_logprobs=2).invoke("Hello")
    assert len(scored.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


main()

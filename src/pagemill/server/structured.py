"""Structured output as HTTP requests ask for it: OpenAI's response_format and vLLM's structured_outputs and guided_*.

Owns these fields, of HTTP requests and of files, and how they become one :class:`StructuredOutputsParams`. A JSON
schema is enforced unless it says ``strict: false``; that one goes into the prompt and no further. Must not compile: the
engine's front does that.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pagemill.errors import RequestError
from pagemill.params import SamplingParams, StructuredOutputsParams

__all__ = [
    "Constraints",
    "JsonSchema",
    "Model",
    "ResponseFormat",
    "constrained_by",
    "schema_hint",
    "structured_outputs",
    "with_hint",
    "writes_json",
    "writes_tags",
]


FORMS = ("json", "regex", "choice", "grammar")
"""Of vLLM's older fields, ``guided_`` before the name."""


class Model(BaseModel):
    """Strict types; unknown fields are kept in ``model_extra``."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class JsonSchema(Model):
    """The schema and how it is meant."""

    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="true and absent: enforced. false: put into the prompt only.")


class ResponseFormat(Model):
    """What the answer looks like."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = Field(
        None, description="Of a structural_tag (vLLM): begin, schema and end of each call that may stand in the text."
    )
    triggers: list[str] | None = Field(None, description="Of a structural_tag: what each of them begins with.")


class Constraints(Model):
    """The fields of a request that constrain its output."""

    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, json_schema or structural_tag."
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="vLLM's: one of json, regex, choice, grammar, json_object, structural_tag."
    )
    guided_json: str | dict[str, Any] | None = Field(None, description="A JSON schema (vLLM's older name).")
    guided_regex: str | None = Field(None, description="A regular expression for the whole output.")
    guided_choice: list[str] | None = Field(None, description="The output is one of these.")
    guided_grammar: str | None = Field(None, description="A grammar in Lark's or GBNF's syntax.")


def structured_outputs(asked: Constraints) -> StructuredOutputsParams | None:
    """What a request asks for, None where nothing is enforced; RequestError where it asks twice."""
    found: dict[str, dict[str, Any]] = {}
    values = _enforced(asked.response_format)
    if values is not None:
        found["response_format"] = values
    if asked.structured_outputs is not None:
        found["structured_outputs"] = asked.structured_outputs
    for form in FORMS:
        value = getattr(asked, f"guided_{form}")
        if value is not None:
            found[f"guided_{form}"] = {form: value}
    if not found:
        return None
    if len(found) > 1:
        raise RequestError(f"{' and '.join(found)} exclude each other; send one of them", param=list(found)[1])
    name, values = next(iter(found.items()))
    try:
        return SamplingParams.create(structured_outputs=dict(values)).structured_outputs
    except RequestError as error:
        raise RequestError(str(error), param=name) from None


def _enforced(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.type == "structural_tag":
        if wanted.structures is None or wanted.triggers is None:
            raise RequestError(
                "response_format of type structural_tag needs structures and triggers", param="response_format"
            )
        return {"structural_tag": {"structures": wanted.structures, "triggers": wanted.triggers}}
    if wanted.json_schema is None:
        raise RequestError("response_format of type json_schema needs json_schema.schema", param="response_format")
    if wanted.json_schema.strict is False:
        return None
    schema = wanted.json_schema.schema_
    return {"json_object": True} if schema is None else {"json": schema}


def constrained_by(asked: Constraints) -> str:
    """The field that :func:`structured_outputs` made something of."""
    if _enforced(asked.response_format) is not None:
        return "response_format"
    given = [form for form in FORMS if getattr(asked, f"guided_{form}") is not None]
    return f"guided_{given[0]}" if given else "structured_outputs"


def writes_tags(params: SamplingParams) -> bool:
    """Whether the output is text with calls in it."""
    return params.structured_outputs is not None and params.structured_outputs.structural_tag is not None


def writes_json(params: SamplingParams) -> bool:
    """Whether the output is JSON from its first character on."""
    structured = params.structured_outputs
    return structured is not None and (structured.json_object or structured.json is not None)


def schema_hint(wanted: ResponseFormat | None) -> str | None:
    """What the prompt says of a schema that is not enforced."""
    if wanted is None or wanted.json_schema is None or wanted.json_schema.strict is not False:
        return None
    schema = json.dumps(wanted.json_schema.schema_ or {"type": "object"}, ensure_ascii=False)
    return f"Answer with JSON that fits this schema, and nothing else:\n{schema}"


def with_hint(messages: list[dict[str, Any]], hint: str) -> list[dict[str, Any]]:
    """Messages whose last one from the user says ``hint`` too (not every template takes a system message)."""
    places = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    if not places:
        return [*messages, {"role": "user", "content": hint}]
    message = messages[places[-1]]
    content = message.get("content")
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": hint}]
    else:
        content = f"{content}\n\n{hint}" if content else hint
    return [{**each, "content": content} if each is message else each for each in messages]

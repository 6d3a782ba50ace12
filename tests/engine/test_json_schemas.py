"""Closing a schema forbids what it does not list, and nothing that it asks for."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.engine.json_schemas import closed

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED = A | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "result"),
    [
        (A, CLOSED),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$defs": {"x": A}, "$ref": "#/$defs/x"}, {"$defs": {"x": CLOSED}, "$ref": "#/$defs/x"}),
        ({"type": "object", "additionalProperties": A}, {"type": "object", "additionalProperties": CLOSED}),
        (
            {"type": "object", "properties": {"b": A}},
            {"type": "object", "properties": {"b": CLOSED}, "additionalProperties": False},
        ),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
    ],
)
def test_objects_that_list_properties_have_no_others(schema: dict[str, Any], result: dict[str, Any]) -> None:
    assert closed(schema) == result
    assert closed(result) == result


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        A | {"additionalProperties": True},
        A | {"additionalProperties": {"type": "integer"}},
        A | {"required": ["a", "b"]},
        A | {"patternProperties": {"^x": {"type": "integer"}}},
        {"allOf": [A, {"type": "object", "properties": {"b": {}}}]},
        {"$defs": {"x": A}, "type": "object", "properties": {"b": {}}, "$ref": "#/$defs/x"},
        {"type": "array", "items": {"allOf": [A, A]}},
        A | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"enum": [{"properties": {"b": 1}}], "default": {"properties": {}}},
        True,
    ],
    ids=str,
)
def test_what_says_more_or_combines_schemas_is_left_alone(schema: Any) -> None:
    assert closed(schema) == schema

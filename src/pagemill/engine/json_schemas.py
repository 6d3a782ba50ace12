"""What a JSON schema leaves open and a language model had better not use.

Owns one rewriting of schemas before they become grammars. Must only ever narrow a schema: what fits the result fits
the original. A caller undoes it by saying ``"additionalProperties": true``.
"""

from __future__ import annotations

from typing import Any

__all__ = ["closed"]

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalProperties")
_SAYS_MORE = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_BESIDE = ("$ref", "anyOf", "oneOf", "if", "dependentSchemas")


def closed(schema: Any) -> Any:
    """Objects that list their properties have no others, unless the schema says so.

    JSON Schema allows others by default, and a small model left free to add some does not stop. A schema that combines
    several (``allOf``, or ``$ref`` and the like beside ``properties``) is left as it is: closing a part of it would
    forbid what the other parts ask for.
    """
    return schema if _combines(schema) else _closed(schema)


def _combines(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    if "allOf" in schema or ("properties" in schema and any(keyword in schema for keyword in _BESIDE)):
        return True
    return any(_combines(part) for part in _parts(schema))


def _parts(schema: dict[str, Any]) -> list[Any]:
    """Schemas within a schema; what merely looks like one (in ``enum``, ``default``) is none."""
    found: list[Any] = [schema[keyword] for keyword in _SINGLE if keyword in schema]
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), dict):
            found += schema[keyword].values()
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            found += schema[keyword]
    return found


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    changed = dict(schema)
    for keyword in _SINGLE:
        if keyword in changed:
            changed[keyword] = _closed(changed[keyword])
    for keyword in _MAPS:
        if isinstance(changed.get(keyword), dict):
            changed[keyword] = {name: _closed(part) for name, part in changed[keyword].items()}
    for keyword in _LISTS:
        if isinstance(changed.get(keyword), list):
            changed[keyword] = [_closed(part) for part in changed[keyword]]
    if _lists_all(changed):
        changed["additionalProperties"] = False
    return changed


def _lists_all(schema: dict[str, Any]) -> bool:
    """Whether a schema says nothing of properties but of those that it lists."""
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list):
        return False
    return all(name in listed for name in required) and not any(keyword in schema for keyword in _SAYS_MORE)

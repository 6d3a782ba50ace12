"""Bounds on what a large body is made of, checked before it is parsed: it is values that take long, not text.

The parser holds the interpreter until it is done, whatever thread it runs in, and meanwhile nobody's tokens move.
So a body's shape is looked at first, without making objects of it: how many elements its long lists have, how many
strings are in them, and how long everything else is. Owns these limits; must not validate.
"""

from __future__ import annotations

import re

import msgspec

from pagemill.errors import PayloadTooLargeError, RequestError

__all__ = ["check_shape"]

SMALL_BYTES = 64 * 1024
"""Up to here nothing that a body can hold takes long."""
MAX_OTHER_BYTES = 256 * 1024
"""All fields that are not prompts, together."""
MAX_IDS = 1 << 18
"""Numbers in one field."""
MAX_ITEMS = 4096
"""Elements of a list that are not numbers: messages, texts, documents."""
MAX_STRINGS = 65_536
"""Strings within one list, names of fields among them."""


class _Long(msgspec.Struct):
    """The fields that may be long. All others are skipped without being looked at."""

    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    tokens: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    queries: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    text_2: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Long).decode
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


def check_shape(body: bytes) -> None:
    """Raise RequestError for a body that would take long to parse, or is no JSON object at all."""
    if len(body) <= SMALL_BYTES:
        return
    try:
        found = _decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON, or no object: {error}") from None
    others = len(body)
    for name in found.__struct_fields__:
        raw = bytes(getattr(found, name))
        others -= len(raw)
        if raw[:1] == b"[":
            _check_list(name, raw)
    if others > MAX_OTHER_BYTES:
        raise PayloadTooLargeError(
            f"the body has {others} bytes beside its prompt; the limit is {MAX_OTHER_BYTES}; shorten its other fields"
        )


def _check_list(name: str, raw: bytes) -> None:
    """Commas and quotes are counted, which takes a moment even for megabytes."""
    # A quote within a string is escaped; whoever escapes to be counted less is still counted half.
    strings = (raw.count(b'"') - raw.count(b'\\"') + 1) // 2
    if strings > MAX_STRINGS:
        raise RequestError(
            f"{name} holds {strings} strings or more; the limit is {MAX_STRINGS}; send fewer at once", param=name
        )
    count = raw.count(b",") + 1
    if strings and count > MAX_ITEMS:
        count = _STRING.sub(b"", raw).count(b",") + 1  # text has commas, too
    if count > MAX_IDS:
        raise RequestError(f"{name} has {count} values; the limit is {MAX_IDS}; send fewer at once", param=name)
    if strings and count > MAX_ITEMS and name != "prompt":
        count = len(_elements(raw))
        if count > MAX_ITEMS:
            raise RequestError(f"{name} has {count} elements; the limit is {MAX_ITEMS}; send fewer at once", param=name)

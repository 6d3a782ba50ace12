"""Mistral: ``[TOOL_CALLS][{...}, ...]``; later models write ``[TOOL_CALLS]name[ARGS]{arguments}``.

Their templates refuse ids that are not nine letters and digits.
"""

from __future__ import annotations

import secrets
import string

from pagemill.server.parsers.formats import ToolFormat

__all__ = ["MISTRAL"]

ALPHABET = string.ascii_letters + string.digits


def _nine() -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(9))


MISTRAL = ToolFormat(openers=("[TOOL_CALLS]",), leading_name=True, special=True, hints=("[TOOL_CALLS]",), new_id=_nine)

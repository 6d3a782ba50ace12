"""Models without a format of their own: an output that is a JSON call, or a list of calls, of the request's tools."""

from __future__ import annotations

from pagemill.server.parsers.formats import ToolFormat

__all__ = ["JSON"]

JSON = ToolFormat(bare=True)

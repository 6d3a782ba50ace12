"""Pagemill serves open-weight language models from paged KV memory."""

__all__: list[str] = []

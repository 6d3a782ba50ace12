"""Start and stop a server."""

from __future__ import annotations

from pagemill.config import EngineConfig, ServerConfig
from pagemill.errors import ConfigError

__all__ = ["serve"]


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until told to stop."""
    raise ConfigError("serve lands with the HTTP routes")

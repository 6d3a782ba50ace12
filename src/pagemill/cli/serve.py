"""``pagemill serve``: the HTTP server with its engine in a process of its own.

Owns only the command line; pagemill.server.run starts and stops things.
"""

from __future__ import annotations

import argparse

from pagemill.cli.arguments import add_config_flags, config_from
from pagemill.config import EngineConfig, ServerConfig

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """All fields of both configs are flags."""
    add_config_flags(parser, EngineConfig)
    add_config_flags(parser, ServerConfig)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; 0 after an orderly end."""
    engine_config, server_config = config_from(args, EngineConfig), config_from(args, ServerConfig)

    from pagemill.server.run import serve

    return serve(engine_config, server_config)

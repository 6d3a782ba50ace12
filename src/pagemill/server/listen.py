"""How the server listens: uvicorn's settings, TLS, and as many descriptors as connections need.

Owns the settings of uvicorn, for the product and its tests alike. Must not know routes.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import uvicorn

from pagemill.config import ServerConfig
from pagemill.errors import ConfigError
from pagemill.server.connection import connection_class

__all__ = ["BACKLOG", "QuietServer", "allow_descriptors", "reload_certificate", "settings", "tls_context"]

logger = logging.getLogger("pagemill.server")

BACKLOG = 2048
CLOSING_S = 3
"""Seconds that connections get to take their last bytes once everything has ended."""
OTHER_DESCRIPTORS = 128
"""Kept for what is not a connection: files, sockets to the engine, pipes."""


class QuietServer(uvicorn.Server):
    """uvicorn without its own handling of signals: whoever runs it decides."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What HTTPS needs, None for HTTP; raises ConfigError for certificates that cannot be used."""
    if config.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(config, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --ssl-certfile, the server's certificate")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"the certificate cannot be used ({error}); check --ssl-certfile={config.ssl_certfile!r},"
            f" --ssl-keyfile={config.ssl_keyfile!r} and --ssl-ca-certs={config.ssl_ca_certs!r}"
        ) from None
    return context


def reload_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Take in a renewed certificate for connections from now on. One that cannot be used changes nothing."""
    assert config.ssl_certfile is not None
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:
        logger.error("the certificate stays as it was: %s", error)
    else:
        logger.info("read the certificate again")


def settings(
    app: Any, config: ServerConfig, tls: ssl.SSLContext | None = None, *, closing_s: int = CLOSING_S
) -> uvicorn.Config:
    """uvicorn without what costs per request."""
    made = uvicorn.Config(
        app,
        http=connection_class(config),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=config.timeout_keep_alive,
        timeout_graceful_shutdown=closing_s,
    )
    made.load()
    made.ssl = tls
    return made


def allow_descriptors(config: ServerConfig) -> ServerConfig:
    """Raise this process's limit of open files to what the connections need, or lower their number to what it is."""
    try:
        import resource
    except ImportError:
        return config  # not on Windows
    wanted = config.max_connections + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return config
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    if possible == wanted:
        return config
    fitting = max(1, possible - OTHER_DESCRIPTORS)
    logger.warning("at most %d connections: this process may open no more than %d files (ulimit -n)", fitting, possible)
    return replace(config, max_connections=fitting)

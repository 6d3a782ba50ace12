"""Start, drain and stop: one process with the HTTP server, which starts the engine's process.

Order: take the port (a port in use must fail before a model is loaded), start the engine and meanwhile import the
HTTP stack, listen, print where. On SIGTERM or SIGINT: new requests are answered 503, open ones get
``--shutdown-timeout`` seconds, then they are aborted with an error event; exit code 0. A second signal skips the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagemill.config import EngineConfig, ServerConfig
from pagemill.errors import ConfigError

if TYPE_CHECKING:
    from pagemill.server.context import ServerContext
    from pagemill.server.engine_port import Engine

__all__ = ["bind", "serve"]

BACKLOG = 2048
CLOSING_S = 3
"""Seconds that connections get to take their last bytes once everything has ended."""

logger = logging.getLogger("pagemill.server")


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until a signal; returns the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("pagemill").setLevel(server_config.log_level.upper())
    with contextlib.closing(bind(server_config.host, server_config.port)) as listener:
        try:
            import uvloop
        except ImportError:
            return asyncio.run(_serve(engine_config, server_config, listener))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(engine_config, server_config, listener))


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet; raises ConfigError naming the address and the fix."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use; choose another with --port, or --port 0 for a free one")
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} on {host} needs privileges; choose one from 1024 up with --port")
    return ConfigError(f"cannot listen on --host {host} --port {port}: {error.strerror or error}")


async def _serve(engine_config: EngineConfig, server_config: ServerConfig, listener: socket.socket) -> int:
    phases = _Phases()
    template = _template_source(server_config.chat_template)
    with _signals() as stop:
        async with _Engine(engine_config, server_config) as starting:
            engine = await _unless_stopped(starting, stop)
            if engine is None:
                return 0
            phases.done("engine")
            return await _listen(engine, server_config, listener, template, stop, phases)


class _Engine:
    """Starts the engine on entry, in a task; shuts it down on exit, whatever happened."""

    def __init__(self, engine_config: EngineConfig, server_config: ServerConfig) -> None:
        self._configs = engine_config, server_config
        self._task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> asyncio.Task[Any]:
        from pagemill.engine.frontend import AsyncLLM

        self._task = asyncio.create_task(AsyncLLM.start(self._configs[0]))
        await asyncio.sleep(0)  # the engine's process starts before the imports below take the time
        await asyncio.to_thread(_import_http)
        return self._task

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        if not self._task.done():
            self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            engine = await self._task
            await engine.shutdown(0.0)


def _import_http() -> None:
    """What listening needs, imported while the engine loads."""

    import pagemill.server.app  # noqa: F401


async def _unless_stopped(starting: asyncio.Task[Any], stop: _Stop) -> Engine | None:
    stopping = asyncio.create_task(stop.first.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if stop.first.is_set():
        return None
    engine: Engine = await starting
    return engine


async def _listen(
    engine: Engine,
    config: ServerConfig,
    listener: socket.socket,
    template: str | None,
    stop: _Stop,
    phases: _Phases,
) -> int:
    import uvicorn

    from pagemill.server.app import build_app

    app = build_app(engine, config)
    if template is not None:
        app.context.use_template(template)
    server = _quiet_server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=config.timeout_keep_alive,
            timeout_graceful_shutdown=CLOSING_S,
        )
    )
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(config.host, config.port, error) from None
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    phases.done("http")
    _announce(app.context, listener, phases)
    stopping = asyncio.create_task(stop.first.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await _drain(app.context, config.shutdown_timeout, stop)
    await engine.shutdown(0.0)
    server.should_exit = True
    await serving
    return 0


async def _drain(context: ServerContext, timeout_s: float, stop: _Stop) -> None:
    context.draining = True
    count = context.admission.open
    if count:
        logger.info("draining: %d open sequences get %g s (a second signal ends them now)", count, timeout_s)
    waits = [asyncio.create_task(event.wait()) for event in (context.admission.idle, stop.second)]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _quiet_server(config: Any) -> Any:
    """A uvicorn server that leaves signals alone."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(config)


class _Stop:
    """The first and the second signal."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def __call__(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@contextlib.contextmanager
def _signals() -> Iterator[_Stop]:
    stop = _Stop()
    loop = asyncio.get_running_loop()
    kinds = (signal.SIGINT, signal.SIGTERM)
    for kind in kinds:
        loop.add_signal_handler(kind, stop)
    try:
        yield stop
    finally:
        for kind in kinds:
            loop.remove_signal_handler(kind)


class _Phases:
    """Seconds per phase of the start."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._done: list[str] = []

    def done(self, name: str) -> None:
        now = time.monotonic()
        self._done.append(f"{name} {now - self._last:.2f} s")
        self._last = now

    def __str__(self) -> str:
        return ", ".join(self._done)


def _template_source(given: str | None) -> str | None:
    """--chat-template is a file, or the template itself."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template={given!r} cannot be read ({error}); name a Jinja file, or give the template itself"
        ) from None


def _announce(context: ServerContext, listener: socket.socket, phases: _Phases) -> None:
    """Where to go from here, on stdout."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}"
    body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    key = ' -H "Authorization: Bearer $API_KEY"' if context.config.api_key else ""
    print(f"Serving {context.model_name} at {url}/v1 (started in: {phases})")
    print(f"  curl {url}/v1/chat/completions -H 'content-type: application/json'{key} -d {shlex.quote(body)}")
    print(f"  web page: {url}/", flush=True)

"""Start, drain and stop: one process with the HTTP server, which starts the engine's process.

Order: take the port (a port in use must fail before a model is loaded), start the engine and meanwhile import the
HTTP stack, listen, print where. On SIGTERM or SIGINT: new requests are answered 503, open ones get
``--shutdown-timeout`` seconds, then they are aborted with an error event; exit code 0. A second signal skips the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagemill.config import EngineConfig, ServerConfig
from pagemill.engine.frontend import AsyncLLM
from pagemill.engine.process import EngineProcess
from pagemill.errors import ConfigError

if TYPE_CHECKING:
    from pagemill.server.context import ServerContext

__all__ = ["bind", "serve"]

BACKLOG = 2048
CLOSING_S = 3
"""Seconds that connections get to take their last bytes once everything has ended."""

logger = logging.getLogger("pagemill.server")


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until a signal; returns the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("pagemill").setLevel(server_config.log_level.upper())
    phases = _Phases()
    template = _template_source(server_config.chat_template)
    with contextlib.closing(bind(server_config.host, server_config.port)) as listener:
        process = EngineProcess.spawn()  # it imports while this process does
        runner = _Runner(engine_config, server_config, listener, template, process, phases)
        with asyncio.Runner(loop_factory=_loop_factory()) as loop:
            return loop.run(runner.run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None  # not on Windows
    return uvloop.new_event_loop


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


class _Runner:
    """One run of the server."""

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        listener: socket.socket,
        template: str | None,
        process: EngineProcess,
        phases: _Phases,
    ) -> None:
        self._engine_config = engine_config
        self._config = config
        self._listener = listener
        self._template = template
        self._process = process
        self._phases = phases

    async def run(self) -> int:
        """Start the engine, serve, and end it, whatever happened in between."""
        with _signals() as stop:
            starting = asyncio.create_task(self._start_engine())
            try:
                await asyncio.to_thread(_import_http)
                self._phases.done("imports")
                await _first_of(starting, stop.first)
                if stop.first.is_set():
                    return 0
                engine = await starting
                self._phases.done("model")
                return await self._listen(engine, stop)
            finally:
                starting.cancel()
                for result in await asyncio.gather(starting, return_exceptions=True):
                    if not isinstance(result, BaseException):
                        await result.shutdown()

    async def _start_engine(self) -> AsyncLLM:
        return await AsyncLLM.start(
            self._engine_config,
            process=self._process,
            max_num_queued_reqs=self._config.max_num_queued_reqs,
            log_level=self._config.log_level,
        )

    async def _listen(self, engine: AsyncLLM, stop: _Stop) -> int:
        from pagemill.server.app import build_app

        app = build_app(engine, self._config)
        if self._template is not None:
            app.context.use_template(self._template)
        server = _uvicorn_server(app, self._config)
        try:
            self._listener.listen(BACKLOG)
        except OSError as error:
            raise _cannot_listen(self._config.host, self._config.port, error) from None
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        self._phases.done("http")
        _announce(app.context, self._listener, self._phases)
        gc.collect()
        gc.freeze()  # what was made while starting stays; the collector need not walk it between tokens
        await _first_of(serving, stop.first)
        await _drain(app.context, self._config.shutdown_timeout, stop)
        await engine.shutdown()
        server.should_exit = True
        await serving
        return 0


def _import_http() -> None:
    """What listening needs, imported while the engine loads."""

    import pagemill.server.app  # noqa: F401


async def _first_of(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    """Until either has happened."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


async def _drain(context: ServerContext, timeout_s: float, stop: _Stop) -> None:
    context.draining = True
    count = context.admission.open
    if count:
        logger.info("draining: %d open sequences get %g s (a second signal ends them now)", count, timeout_s)
    waits = [asyncio.create_task(event.wait()) for event in (context.admission.idle, stop.second)]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _uvicorn_server(app: Any, config: ServerConfig) -> Any:
    """uvicorn without what costs per request, leaving signals alone."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    settings = uvicorn.Config(
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
    return Server(settings)


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
    body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0.2}'
    key = ' -H "Authorization: Bearer $API_KEY"' if context.config.api_key else ""
    print(f"Serving {context.model_name} at {url}/v1 (started in: {phases})")
    print(f"  curl {url}/v1/chat/completions -H 'content-type: application/json'{key} -d {shlex.quote(body)}")
    print(f"  web page: {url}/", flush=True)

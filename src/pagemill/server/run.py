"""Start, drain and stop: one process with the HTTP server, which starts the engine's process.

Order: take the port (a port in use must fail before a model is loaded), start the engine and meanwhile import the
HTTP stack, listen, print where. On SIGTERM or SIGINT: new requests are answered 503, open ones get
``--shutdown-timeout`` seconds, then they are aborted with an error event; exit code 0. A second signal skips the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import gc
import logging
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pagemill.config import EngineConfig, ServerConfig, tokenize_in_own_thread
from pagemill.engine.frontend import AsyncLLM
from pagemill.engine.process import EngineProcess
from pagemill.errors import ConfigError
from pagemill.server.keys import Keys
from pagemill.server.request_log import RequestLog

if TYPE_CHECKING:
    import ssl

    from opentelemetry.sdk.trace import SpanProcessor

    from pagemill.server.context import ServerContext

__all__ = ["bind", "serve"]

logger = logging.getLogger("pagemill.server")


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until a signal; returns the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("pagemill").setLevel(server_config.log_level.upper())
    tokenize_in_own_thread()
    phases = _Phases()
    template = None
    if server_config.chat_template is not None:
        from pagemill.models.chat_template import template_source

        template = template_source(server_config.chat_template)
    keys = Keys(server_config.api_key, server_config.api_key_file)
    server_config = dataclasses.replace(server_config, api_key=())  # from here on only their hashes are kept
    with contextlib.closing(bind(server_config.host, server_config.port)) as listener:
        process = EngineProcess.spawn()  # it imports while this process does
        runner = _Runner(engine_config, server_config, listener, keys, template, process, phases)
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
    # Said to be TCP, else asyncio leaves out TCP_NODELAY, and an answer's second part waits 40 ms for the reader's ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
        keys: Keys,
        template: str | None,
        process: EngineProcess,
        phases: _Phases,
    ) -> None:
        self._engine_config = engine_config
        self._config = config
        self._listener = listener
        self._keys = keys
        self._tracing: SpanProcessor | None = None
        self._template = template
        self._process = process
        self._phases = phases

    async def run(self) -> int:
        """Start the engine, serve, and end it, whatever happened in between."""
        if self._config.otlp_traces_endpoint is not None:
            from pagemill.server.tracing import otlp_processor

            self._tracing = otlp_processor(self._config.otlp_traces_endpoint)
        reads_files = bool(self._config.api_key_file or self._config.ssl_certfile)
        with _signals(reads_files) as stop:
            starting = asyncio.create_task(self._start_engine())
            try:
                tls = await asyncio.to_thread(_import_http, self._config)
                self._phases.done("imports")
                await _first_of(starting, stop.first)
                if stop.first.is_set():
                    return 0
                engine = await starting
                self._phases.done("model")
                return await self._listen(engine, stop, tls)
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
            max_num_queued_tokens=self._config.max_num_queued_tokens,
            log_level=self._config.log_level,
        )

    async def _listen(self, engine: AsyncLLM, stop: _Stop, tls: ssl.SSLContext | None) -> int:
        from pagemill.server import listen
        from pagemill.server.app import build_app

        config = listen.allow_descriptors(self._config)
        app = build_app(engine, config, self._keys)
        if self._template is not None:
            app.context.use_template(self._template)
        server = listen.QuietServer(listen.settings(app, config, tls))
        stop.on_hang_up = [self._keys.reread]
        if tls is not None:
            stop.on_hang_up.append(functools.partial(listen.reload_certificate, tls, config))
        try:
            self._listener.listen(listen.BACKLOG)
        except OSError as error:
            raise _cannot_listen(self._config.host, self._config.port, error) from None
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        self._phases.done("http")
        _announce(app.context, self._listener, self._phases)
        gc.collect()
        gc.freeze()  # what was made while starting stays; the collector need not walk it between tokens
        watching = asyncio.create_task(self._keys.watch())
        with _watchers(engine, app.context, self._tracing):
            await _first_of(serving, stop.first)
            watching.cancel()
            await _drain(app.context, self._config.shutdown_timeout, stop)
            await engine.shutdown()
        server.should_exit = True
        await serving
        return 0


def _import_http(config: ServerConfig) -> ssl.SSLContext | None:
    """What listening needs, imported while the engine loads; certificates that cannot be used are told of early."""
    import pagemill.server.app  # noqa: F401
    from pagemill.server.listen import tls_context

    return tls_context(config)


@contextlib.contextmanager
def _watchers(engine: AsyncLLM, context: ServerContext, tracing: SpanProcessor | None) -> Iterator[None]:
    """Whoever wants to know of requests that end."""
    config = context.config
    with contextlib.ExitStack() as stack:
        if config.enable_log_requests:
            log = RequestLog(sys.stdout, context.model_name, max_chars=config.max_log_len)
            stack.callback(log.close)
            context.log = log
            engine.observe(log.finished, content=config.enable_log_content)
        if tracing is not None:
            from pagemill.server.tracing import Tracer

            tracer = Tracer(tracing, context.model_name)
            stack.callback(tracer.close)
            context.traces = True
            engine.observe(tracer.finished)
        yield


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


class _Stop:
    """The first and the second signal to end, and what a hang-up does."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.on_hang_up: list[Callable[[], None]] = []
        """What SIGHUP does: files are read again."""

    def __call__(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def hang_up(self) -> None:
        for each in self.on_hang_up:
            each()


@contextlib.contextmanager
def _signals(reads_files: bool) -> Iterator[_Stop]:
    """With files that may change, SIGHUP reads them again; else it ends the process as it ends any."""
    stop = _Stop()
    loop = asyncio.get_running_loop()
    handlers: dict[signal.Signals, Callable[[], None]] = {signal.SIGINT: stop, signal.SIGTERM: stop}
    if reads_files:
        handlers[signal.SIGHUP] = stop.hang_up
    for kind, handler in handlers.items():
        loop.add_signal_handler(kind, handler)
    try:
        yield stop
    finally:
        for kind in handlers:
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


def _announce(context: ServerContext, listener: socket.socket, phases: _Phases) -> None:
    """Where to go from here, on stdout."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"{'https' if context.config.ssl_certfile else 'http'}://{shown}:{port}"
    pooling = context.engine.pooling
    path, body = (
        "chat/completions",
        '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 100}',
    )
    if pooling is not None and pooling.num_scores:
        path, body = "score", '{"text_1": "Why is the sky blue?", "text_2": ["Light scatters.", "Grass is green."]}'
    elif pooling is not None:
        path, body = "embeddings", '{"input": ["Why is the sky blue?", "Light scatters."]}'
    key = ' -H "Authorization: Bearer $API_KEY"' if context.keys.required else ""
    print(f"Serving {context.model_name} at {url}/v1 (started in: {phases})")
    print(f"  curl {url}/v1/{path} -H 'content-type: application/json'{key} -d {shlex.quote(body)}")
    print(f"  web page: {url}/", flush=True)

"""A real uvicorn on a real socket over an engine, and the official client against it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from pagemill.config import DEFAULT_MODEL, EngineConfig, ServerConfig
from pagemill.engine.frontend import AsyncLLM
from pagemill.server import listen
from pagemill.server.app import build_app
from pagemill.server.gate import Gate
from pagemill.server.run import bind
from tests.server.fake_engine import FakeEngine

REQUEST_TIMEOUT_S = 600
"""Only a bound on a hang: on a busy machine a test may stand still for minutes in the middle of a request."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()


class Served:
    """A running server: its address, its application, its engine, and clients."""

    def __init__(self, url: str, app: Gate, engine: FakeEngine, server: uvicorn.Server) -> None:
        self.server = server
        self.url = url
        self.app = app
        self.engine = engine
        self.http = httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S)
        self.openai = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S)

    async def aclose(self) -> None:
        await self.http.aclose()
        await self.openai.close()


@asynccontextmanager
async def serving(engine: FakeEngine, config: ServerConfig | None = None) -> AsyncIterator[Served]:
    """Listen on a free port for the duration of the block."""
    config = config or ServerConfig()
    app = build_app(engine, config)
    tls = listen.tls_context(config)
    listener = bind("127.0.0.1", 0)
    server = _Server(listen.settings(app, config, tls, closing_s=1))
    task = asyncio.create_task(server._serve(sockets=[listener]))
    served = Served(
        f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}", app, engine, server
    )
    try:
        await server.listens.wait()
        yield served
    finally:
        await served.aclose()
        server.should_exit = True
        await task
        listener.close()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def served(engine: FakeEngine) -> AsyncIterator[Served]:
    async with serving(engine) as running:
        yield running


@pytest.fixture
async def embedded(embedded_source: Any) -> AsyncIterator[AsyncLLM]:
    """A real engine with the embedded model."""
    made = await AsyncLLM.start(EngineConfig(model=DEFAULT_MODEL, max_model_len=4096))
    yield made
    await made.shutdown()

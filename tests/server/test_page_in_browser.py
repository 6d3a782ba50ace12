"""The web page in headless Chromium: a chat streams, stop stops, regenerate asks again, the live view moves."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngine

selenium = pytest.importorskip("selenium.webdriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine"),
]

PATIENCE_S = 20


@pytest.fixture(params=["1200,800", "390,800"], ids=["desk", "phone"])
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    options = selenium.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={request.param}"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = selenium.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = selenium.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(FakeEngine("Hello, <b>world</b>.\n1 < 2")) as running:
        yield running


async def until(look: Callable[[], Any], wanted: Callable[[Any], bool]) -> Any:
    """Look at the page, in a thread, until it shows what is wanted."""
    async with asyncio.timeout(PATIENCE_S):
        while not wanted(found := await asyncio.to_thread(look)):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return found


def texts(browser: Any) -> list[str]:
    return [str(item.text) for item in browser.find_elements("css selector", "#messages li")]


async def test_a_conversation(browser: Any, served: Served) -> None:
    await asyncio.to_thread(browser.get, served.url + "/")
    await until(lambda: browser.find_element("id", "model").text, lambda text: "fake/model" in text)
    await until(lambda: browser.find_element("id", "health").text, lambda text: text == "ready")

    box = browser.find_element("id", "input")
    await asyncio.to_thread(box.send_keys, "hi\n")
    shown = await until(lambda: texts(browser), lambda list_: len(list_) == 2 and "first token" in list_[1])
    assert shown[0] == "hi"
    assert shown[1].startswith("Hello, <b>world</b>.\n1 < 2")

    served.engine.gate.clear()
    await asyncio.to_thread(box.send_keys, "again\n")
    await until(lambda: served.engine.running, bool)
    stop = browser.find_element("id", "stop")
    await asyncio.to_thread(stop.click)
    await until(lambda: served.engine.running, lambda running: not running)
    assert served.engine.aborted
    served.engine.gate.set()
    await until(lambda: texts(browser), lambda list_: len(list_) == 4 and "stopped" in list_[3])

    await asyncio.to_thread(browser.find_element("id", "again").click)
    shown = await until(lambda: texts(browser), lambda list_: len(list_) == 4 and "first token" in list_[3])
    assert shown[2] == "again"
    assert shown[3].startswith("Hello")
    roles = served.engine.tokenizer.decode(served.engine.seen[-1][0], skip_special_tokens=False)
    assert roles.count("<|open|>user") == 2
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


async def test_an_error_is_shown(browser: Any, served: Served) -> None:
    await asyncio.to_thread(browser.get, served.url + "/")
    served.app.context.draining = True
    await asyncio.to_thread(browser.find_element("id", "input").send_keys, "hi\n")
    await until(lambda: texts(browser), lambda list_: len(list_) == 2 and "shutting down" in list_[1])

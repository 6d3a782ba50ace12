"""The web page in headless Chromium: a chat streams, stop stops, regenerate asks again, the map of blocks moves."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from pagemill.config import ServerConfig
from pagemill.models.sources import ModelSource
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngine
from tests.server.process import ServeProcess, serve_process

selenium = pytest.importorskip("selenium.webdriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("chromium") is None or shutil.which("chromedriver") is None,
        reason="this machine has no chromium and chromedriver",
    ),
]

PATIENCE_S = 120
"""Only a bound on a hang."""


def started(size: str) -> Any:
    options = selenium.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={size}"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return selenium.Chrome(
        options=options, service=selenium.ChromeService(executable_path=shutil.which("chromedriver"))
    )


@pytest.fixture(params=["1200,800", "390,800"], ids=["desk", "phone"])
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    driver = started(request.param)
    yield driver
    driver.quit()


@pytest.fixture
def desk() -> Iterator[Any]:
    driver = started("1200,800")
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def real(embedded_source: ModelSource) -> Iterator[ServeProcess]:
    """1,024 blocks."""
    with serve_process("--max-num-seqs", "8", "--max-model-len", "2048") as running:
        yield running


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


async def test_an_answer_that_a_new_chat_cut_off_is_no_part_of_it(desk: Any, served: Served) -> None:
    await asyncio.to_thread(desk.get, served.url + "/")
    box = desk.find_element("id", "input")
    served.engine.script = "word " * 100
    served.engine.hold_after = 3
    await asyncio.to_thread(box.send_keys, "hi\n")
    await until(lambda: texts(desk), lambda list_: len(list_) == 2 and "wor" in list_[1])
    await asyncio.to_thread(desk.find_element("id", "clear").click)
    await until(lambda: served.engine.running, lambda running: not running)
    served.engine.hold_after = None
    await asyncio.to_thread(box.send_keys, "new\n")
    await until(lambda: texts(desk), lambda list_: len(list_) == 2 and "first token" in list_[1])
    prompt = served.engine.tokenizer.decode(served.engine.seen[-1][0], skip_special_tokens=False)
    assert prompt == "<|open|>user: new<|close|><|open|>assistant: "


async def test_what_a_model_thinks_is_shown_above_its_answer(desk: Any) -> None:
    async with serving(FakeEngine("<think>so much</think>Yes."), ServerConfig(reasoning_parser="qwen3")) as served:
        await asyncio.to_thread(desk.get, served.url + "/")
        await asyncio.to_thread(desk.find_element("id", "input").send_keys, "hi\n")
        shown = await until(lambda: texts(desk), lambda list_: len(list_) == 2 and "first token" in list_[1])
        assert shown[1].startswith("so much\nYes.")


async def test_an_error_is_shown(browser: Any, served: Served) -> None:
    await asyncio.to_thread(browser.get, served.url + "/")
    served.app.context.draining = True
    await asyncio.to_thread(browser.find_element("id", "input").send_keys, "hi\n")
    await until(lambda: texts(browser), lambda list_: len(list_) == 2 and "shutting down" in list_[1])


def count(browser: Any, kind: str) -> int:
    shown = browser.find_element("id", f"count-{kind}").text.replace(",", "")
    return int(shown) if shown.isdigit() else -1


def picture(browser: Any) -> str:
    """The map of blocks as it is drawn."""
    return str(browser.execute_script("return document.getElementById('blocks').toDataURL()"))


def size_of(browser: Any, script: str) -> float:
    return float(browser.execute_script(f"return {script}"))


async def test_the_map_of_blocks_follows_the_requests(desk: Any, real: ServeProcess) -> None:
    await asyncio.to_thread(desk.get, real.url + "/")
    await until(lambda: count(desk, "free"), lambda free: free == 1024)
    empty = await asyncio.to_thread(picture, desk)
    box = desk.find_element("id", "input")
    await asyncio.to_thread(box.send_keys, "Count from one to a thousand.\n")
    await until(lambda: count(desk, "private"), lambda private: private > 2)
    busy = await until(lambda: picture(desk), lambda drawn: drawn != empty)
    await until(lambda: picture(desk), lambda drawn: drawn not in {empty, busy})
    await asyncio.to_thread(desk.find_element("id", "stop").click)
    await until(lambda: count(desk, "private"), lambda private: private == 0)
    await until(lambda: count(desk, "cached"), lambda cached: cached > 0)
    assert desk.find_element("id", "blocks").get_attribute("aria-label").startswith("1024 KV blocks: ")
    assert [entry for entry in desk.get_log("browser") if entry["level"] == "SEVERE"] == []


async def test_two_chats_stream_at_once_and_share_their_system_prompt(desk: Any, real: ServeProcess) -> None:
    system = "You are a careful assistant. " * 20

    def opened() -> str:
        desk.get(real.url + "/")
        # ChromeDriver types a character at a time, and this text is long.
        desk.execute_script("document.getElementById('system').value = arguments[0]", system)
        desk.find_element("id", "input").send_keys("Tell me a long story.\n")
        return str(desk.current_window_handle)

    def told(window: str) -> str:
        desk.switch_to.window(window)
        return texts(desk)[1] if len(texts(desk)) == 2 else ""

    first = await asyncio.to_thread(opened)
    await until(lambda: told(first), lambda text: len(text) > 40)
    desk.switch_to.new_window("window")
    second = await asyncio.to_thread(opened)
    await until(lambda: told(second), lambda text: len(text) > 40)
    await until(lambda: count(desk, "shared"), lambda shared: shared >= 5)  # the page asks now and then
    grown = len(await asyncio.to_thread(told, first))
    await until(lambda: told(first), lambda text: len(text) > grown)
    for window in (first, second):
        desk.switch_to.window(window)
        await asyncio.to_thread(desk.find_element("tag name", "body").send_keys, selenium.Keys.ESCAPE)
        await until(lambda: texts(desk), lambda list_: "stopped" in list_[1])
    await until(lambda: count(desk, "private") + count(desk, "shared"), lambda held: held == 0)


@pytest.mark.parametrize("blocks", [10, 1000, 100_000])
async def test_the_map_fits_its_column_whatever_the_number_of_blocks(browser: Any, served: Served, blocks: int) -> None:
    served.engine.num_blocks = blocks
    await asyncio.to_thread(browser.get, served.url + "/")
    await until(lambda: count(browser, "free"), lambda free: free == blocks - 1)
    assert size_of(browser, "document.getElementById('blocks').clientHeight") <= 320
    assert size_of(browser, "document.documentElement.scrollWidth - innerWidth") <= 0
    drawn = "new Set(document.getElementById('blocks').getContext('2d').getImageData(0, 0, {}, {}).data).size"
    width, height = (size_of(browser, f"document.getElementById('blocks').{side}") for side in ("width", "height"))
    assert size_of(browser, drawn.format(width, height)) > 4


async def test_behind_a_key_the_browsers_own_prompt_opens_the_whole_page(desk: Any) -> None:
    async with serving(FakeEngine(), ServerConfig(api_key=("secret",))) as served:
        await asyncio.to_thread(desk.get, served.url.replace("http://", "http://me:secret@") + "/")
        await asyncio.to_thread(desk.get, served.url + "/")  # the browser now knows the password, as after its prompt
        await until(lambda: count(desk, "cached"), lambda cached: cached == 1)
        await asyncio.to_thread(desk.find_element("id", "input").send_keys, "hi\n")
        await until(lambda: texts(desk), lambda list_: len(list_) == 2 and "Hello" in list_[1])

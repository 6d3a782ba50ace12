"""The file of API keys: its format, that it is read again, and that a mistake in it opens nothing."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from pathlib import Path

import pytest

from pagemill.config import ServerConfig
from pagemill.errors import ConfigError
from pagemill.server.keys import Keys
from tests.server.conftest import serving
from tests.server.fake_engine import FakeEngine


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key.encode())]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "keys"
    found.write_text(f"# who may come in\n\nplain-key\nalice:{sha256('of alice')}\nbob@b.test:sha256:{sha256('b')}\n")
    return found


def test_plain_and_hashed_keys_open_and_have_names(file: Path) -> None:
    keys = Keys(file=str(file))
    plain, alice, bob = (keys.admit(bearer(key)) for key in ("plain-key", "of alice", "b"))
    assert plain
    assert alice
    assert bob
    assert plain.name == "key-" + sha256("plain-key")[:8]
    assert (alice.name, bob.name) == ("alice", "bob@b.test")
    assert len({plain.identity, alice.identity, bob.identity}) == 3
    for wrong in ("", "alice", sha256("of alice"), f"alice:{sha256('of alice')}", "# who may come in"):
        assert keys.admit(bearer(wrong)) is None


def test_a_key_has_one_identity_however_it_was_written_down(file: Path) -> None:
    hashed = Keys(file=str(file)).admit(bearer("of alice"))
    given = Keys(["of alice"]).admit(bearer("of alice"))
    assert hashed
    assert given
    assert hashed.identity == given.identity


def test_every_known_key_is_compared_in_constant_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(["one", "two"], str(file))
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(b) or compare(a, b))  # type: ignore[func-returns-value]
    for sent in ("one", "of alice", "none of them"):
        compared.clear()
        keys.admit(bearer(sent))
        assert len(compared) == 5


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "no key"),
        (b"# nothing\n\n", "no key"),
        (b"good\nsecret with blanks\n", "line 2"),
        ("schlüssel\n".encode(), "line 1"),
        (b"\xff\xfe\x00", "UTF-8"),
    ],
)
def test_a_file_that_is_none_is_refused_without_repeating_its_content(
    tmp_path: Path, content: bytes, part: str
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=part) as caught:
        Keys(file=str(file))
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys(file=str(tmp_path / "none"))


@pytest.mark.parametrize("keys", [[""], ["a", " "]])
def test_an_empty_key_is_refused(keys: list[str]) -> None:
    with pytest.raises(ConfigError, match="empty"):
        Keys(keys)


def test_a_changed_file_is_taken_in_and_a_broken_one_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(["given"], str(file))
    caplog.set_level(logging.INFO, "pagemill.server")
    file.write_text("new-key\n")
    keys.reread()
    assert keys.admit(bearer("new-key"))
    assert keys.admit(bearer("given"))
    assert keys.admit(bearer("plain-key")) is None
    file.write_text("not a key\n")
    keys.reread()
    assert keys.admit(bearer("new-key"))
    file.unlink()
    keys.reread()
    assert keys.admit(bearer("new-key"))
    file.write_text("")
    keys.reread()
    assert keys.admit(bearer("new-key")) is None
    assert keys.required
    assert "new-key" not in caplog.text


async def test_the_file_is_watched(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagemill.server.keys.WATCH_S", 0)
    async with serving(FakeEngine(), ServerConfig(api_key_file=str(file))) as served:
        headers = {"authorization": "Bearer later"}
        assert (await served.http.get("/v1/models", headers=headers)).status_code == 401
        watching = asyncio.create_task(served.app.context.keys.watch())
        await asyncio.to_thread(file.write_text, "later\n")
        while (await served.http.get("/v1/models", headers=headers)).status_code != 200:
            pass
        watching.cancel()

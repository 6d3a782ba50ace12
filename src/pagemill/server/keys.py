"""API keys: which ones open the server, kept as hashes only, and read again when their file changes.

Owns the format of ``--api-key-file`` and the comparison, which takes the same time whatever was sent. Never shows,
logs or keeps a key.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pagemill.errors import ConfigError

__all__ = ["Key", "Keys"]

logger = logging.getLogger("pagemill.server")

WATCH_S = 2.0
"""How often the file is looked at."""
MAX_KEYS = 10_000
MAX_FILE_BYTES = 4 * 1024 * 1024
_HASHED = re.compile(r"([A-Za-z0-9_.@-]{1,64}):(?:sha256:)?([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of a key that opens the server."""

    name: str
    """For logs: its name in the file, else the beginning of its hash."""
    identity: bytes
    """Differs for every key, and says nothing of it."""


class Keys:
    """The keys that open the server. Without any, and without a file, it is open."""

    def __init__(self, keys: Sequence[str] = (), file: str | None = None) -> None:
        """Raises ConfigError for an empty key, or a file that cannot be read or holds none."""
        if not all(key.strip() for key in keys):
            raise ConfigError("--api-key is empty; give a key, or leave the flag out to ask for none")
        self._given = dict(_entry(key) for key in keys)
        self._file = None if file is None else Path(file).expanduser()
        self._seen: tuple[int, ...] | None = None
        self._from_file: dict[bytes, Key] = {}
        self.required = bool(keys) or file is not None
        """Whether a key is asked for. A file that was emptied later shuts everybody out; it does not open the door."""
        if self._file is not None:
            self._seen = _signature(self._file)
            self._from_file = _read(self._file)
            if not self._from_file:
                raise ConfigError(f"--api-key-file={file!r} holds no key; write one a line, or leave the flag out")

    def admit(self, headers: Sequence[tuple[bytes, bytes]]) -> Key | None:
        """The key that was sent, as a bearer token or by a browser as a password; None if it opens nothing."""
        given = _credentials(headers)
        if given is None:
            return None
        digest = hashlib.sha256(given).digest()
        found = None
        for keys in (self._given, self._from_file):
            for known, key in keys.items():
                if hmac.compare_digest(digest, known):
                    found = key
        return found

    def reread(self) -> None:
        """Take in the file as it is now. One that cannot be read changes nothing and is logged."""
        if self._file is None:
            return
        try:
            self._seen = _signature(self._file)
            self._from_file = _read(self._file)
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        logger.info("read %d API keys from %s", len(self._from_file), self._file)

    async def watch(self) -> None:
        """Read the file again whenever it has changed, for as long as this runs."""
        while self._file is not None:
            await asyncio.sleep(WATCH_S)
            try:
                changed = _signature(self._file) != self._seen
            except ConfigError:
                continue  # gone for the moment: being replaced
            if changed:
                self.reread()


def _entry(key: str) -> tuple[bytes, Key]:
    digest = hashlib.sha256(key.encode()).digest()
    return digest, _key(f"key-{digest.hex()[:8]}", digest)


def _key(name: str, digest: bytes) -> Key:
    return Key(name, hashlib.blake2b(digest, digest_size=16, person=b"pagemill").digest())


def _signature(file: Path) -> tuple[int, ...]:
    """Changes when the file does."""
    try:
        status = file.stat()
    except OSError as error:
        raise ConfigError(f"--api-key-file={str(file)!r} cannot be read ({error.strerror})") from None
    return (status.st_ino, status.st_mtime_ns, status.st_size)


def _read(file: Path) -> dict[bytes, Key]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise ConfigError(f"--api-key-file={str(file)!r} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file={str(file)!r} is not UTF-8 text") from None
    lines = [line.strip() for line in text.splitlines()]
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if len(content) > MAX_FILE_BYTES or len(numbered) > MAX_KEYS:
        raise ConfigError(f"--api-key-file={str(file)!r} is too long; the limit is {MAX_KEYS} keys and 4 MiB")
    found: dict[bytes, Key] = {}
    for number, line in numbered:
        hashed = _HASHED.fullmatch(line)
        if hashed is not None:
            digest = bytes.fromhex(hashed[2])
            found[digest] = _key(hashed[1], digest)
        elif any(character.isspace() for character in line) or not line.isascii():
            raise ConfigError(
                f"--api-key-file={str(file)!r}: line {number} is neither a key (ASCII, without blanks) nor name:sha256"
            )
        else:
            digest, key = _entry(line)
            found[digest] = key
    return found


def _credentials(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    given = [value for name, value in headers if name == b"authorization"]
    if len(given) != 1:
        return None
    scheme, _, value = given[0].partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() != b"basic":
        return None
    # A browser adds a stored password to what other sites send here, too: their Origin gives them away.
    found = {name: value for name, value in headers if name in (b"origin", b"host")}
    origin = found.get(b"origin")
    if origin is not None and _host(origin) != found.get(b"host", b"").decode("latin-1"):
        return None
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return None


def _host(origin: bytes) -> str | None:
    try:
        return urlsplit(origin.decode("latin-1")).netloc
    except ValueError:
        return None

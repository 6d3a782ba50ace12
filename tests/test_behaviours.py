"""docs/behaviours.md names tests that exist, and each case once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = (ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TABLE)
    assert named
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not missing


def test_every_case_stands_there_once() -> None:
    cases = re.findall(r"^\| ([a-z0-9]+-\d\d) \|", TABLE, re.MULTILINE)
    assert len(cases) == len(set(cases)) == 88

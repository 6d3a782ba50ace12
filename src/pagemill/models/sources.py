"""Where a model comes from: a folder, a .gguf file, a hub id, or a package (the embedded default).

Owns the meaning of the word after ``--model`` and finds (or fetches, once) the files behind it. Must not read weights.
Order of effects: the embedded models' names, then what is on disk, then the hub; a hub id never shadows a folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pagemill.config import DEFAULT_MODEL
from pagemill.errors import ModelFormatError, ModelNotFoundError
from pagemill.models import embedded, hub
from pagemill.models.gguf import is_gguf

__all__ = ["ModelSource", "resolve_source", "weight_files"]

EMBEDDED = {DEFAULT_MODEL: embedded.SMOLLM2, "all-minilm-l6-v2": embedded.MINILM}
"""Names of models that come inside packages."""

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<file>[^:]+))?")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Files on this machine. ``path`` is a folder (safetensors) or a file (gguf)."""

    name: str
    """As the user gave it; the served name unless another is set."""
    path: Path
    format: Literal["safetensors", "gguf"]


def resolve_source(model: str, *, revision: str | None = None) -> ModelSource:
    """Find or fetch ``model``.

    ``owner/repo:file.gguf`` and ``owner/repo:Q4_K_M`` name one GGUF file of a hub repository; ``revision`` is a branch,
    tag or commit of it. Raises ModelNotFoundError or ModelFormatError.
    """
    if model in EMBEDDED:
        path = embedded.fetch(EMBEDDED[model])
        return ModelSource(name=model, path=path, format="safetensors" if path.is_dir() else "gguf")
    if not model or "\0" in model:
        raise ModelNotFoundError(f"model {model[:200]!r} is no name; the embedded default is {DEFAULT_MODEL}")
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return _from_folder(model, path)
        if path.is_file():
            return _from_file(model, path)
    except OSError as error:  # a name too long for the file system, no permission
        raise ModelNotFoundError(f"cannot look for model {model[:200]!r}: {error.strerror}") from error
    found = _HUB_ID.fullmatch(model)
    if found and (found["file"] or not model.endswith(".gguf")):
        path = hub.fetch(found["repo"], file=found["file"], revision=revision)
        source = _from_file(model, path) if path.is_file() else _from_folder(model, path)
        return ModelSource(name=model, path=source.path, format=source.format)
    raise ModelNotFoundError(
        f"no model {model[:200]!r}: it is no folder or .gguf file here, and a hub id reads owner/name; "
        f"embedded are {', '.join(EMBEDDED)}"
    )


def _from_file(name: str, path: Path) -> ModelSource:
    if is_gguf(path):
        return ModelSource(name=name, path=path, format="gguf")
    if path.suffix == ".safetensors":
        raise ModelFormatError(f"{path} is one file of a model; name its folder, which holds config.json too")
    if path.suffix == ".gguf":
        raise ModelFormatError(f"{path} is corrupt: it does not start with 'GGUF'; fetch it again")
    raise ModelFormatError(f"{path} is neither a GGUF file nor a folder with safetensors")


def _from_folder(name: str, path: Path) -> ModelSource:
    names = [entry.name for entry in path.iterdir()]
    if any(entry.endswith(".safetensors") for entry in names):
        return ModelSource(name=name, path=path, format="safetensors")
    files = [entry for entry in names if entry.endswith(".gguf")]
    if files:
        return ModelSource(name=name, path=path / hub.choose_gguf(files, None, where=str(path))[0], format="gguf")
    if any(entry.endswith((".bin", ".pt", ".pth")) for entry in names):
        raise ModelFormatError(f"{path} holds pickled weights, which can run code; convert them to safetensors")
    raise ModelNotFoundError(f"{path} holds no .safetensors and no .gguf file")


def weight_files(folder: Path, indexed: Iterable[str] | None = None) -> list[Path]:
    """The safetensors files of a folder: those that its index names, or, without an index, those that look like it."""
    if indexed is None:
        names = hub.choose_safetensors([entry.name for entry in folder.iterdir()])
    else:
        names = sorted(set(indexed))
    for name in names:
        if Path(name).name != name:
            raise ModelFormatError(f"{folder}: its index names {name!r}, which is not a file beside it")
        if not (folder / name).is_file():
            raise ModelNotFoundError(f"{folder} lacks {name}; the model is incomplete: fetch it again")
    if not names:
        raise ModelNotFoundError(f"{folder} holds no .safetensors file with a model's weights")
    return [folder / name for name in names]

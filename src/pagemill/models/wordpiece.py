"""BERT's WordPiece tokenizer from a vocab.txt, for models that come without a tokenizer.json.

Owns the meaning of the file and of tokenizer_config.json's switches for it; the work is the tokenizers library's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pagemill.errors import ModelFormatError

__all__ = ["from_vocab"]

NAMES = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
MAX_WORD_CHARS = 100
"""Longer words are unknown, as in BERT's own tokenizer."""


def from_vocab(path: Path, settings: Mapping[str, Any], special: Mapping[str, str]) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer, and its special tokens by name. ``settings`` is tokenizer_config.json."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path} is not UTF-8; fetch it again") from error
    vocabulary = {line: index for index, line in enumerate(lines)}
    special = {**NAMES, **{name: text for name, text in special.items() if name in NAMES}}
    for name in ("unk_token", "cls_token", "sep_token"):
        if special[name] not in vocabulary:
            raise ModelFormatError(f"{path} has no {special[name]!r}; it is not a WordPiece vocabulary")
    backend = Tokenizer(
        models.WordPiece(vocabulary, unk_token=special["unk_token"], max_input_chars_per_word=MAX_WORD_CHARS)
    )
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True) is not False,
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True) is not False,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    cls, sep = special["cls_token"], special["sep_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])],
    )
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special.values() if text in vocabulary])
    return backend, {name: text for name, text in special.items() if text in vocabulary}

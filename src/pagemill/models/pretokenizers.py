"""How byte-level BPE vocabularies cut text into words, by the name that a GGUF file gives (``tokenizer.ggml.pre``).

Data only, and the one function that turns it into a pre-tokenizer. The patterns are those of the models' own
tokenizers; the names, and which model belongs to which, follow llama.cpp's list (github.com/ggml-org/llama.cpp,
src/llama-vocab.cpp). A kind is a chain: each pattern isolates its matches in what the ones before it left.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

__all__ = ["DEFAULT_KIND", "PreTokenizerKind", "kind_of"]

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_NEWLINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
TRIPLETS = "[0-9][0-9][0-9]"
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
NOT_CLAUSE_MARKS = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _cl100k(digits: str, *, contractions: str = _CONTRACTIONS + "|", letters: str = r"\p{L}") -> str:
    """The pattern of GPT-4's tokenizer and its many relatives, which differ in how they group digits."""
    marks = letters.replace(r"\p{L}", "")
    return rf"{contractions}{_BEFORE_WORD}[{letters}]+|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_NEWLINES}"


def _o200k(digits: str, suffix: str) -> str:
    """The pattern of GPT-4o's tokenizer, which also cuts where the case changes."""
    return (
        rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{suffix}|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_NEWLINES}"
    )


_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼι"
    "ῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _NEWLINES
)


@dataclass(frozen=True, slots=True)
class PreTokenizerKind:
    """One way of cutting text into words."""

    patterns: tuple[str, ...]
    nfc: bool = False
    """Compose accents first, as the model's own tokenizer does."""
    ignore_merges: bool = False
    """A word that is in the vocabulary is one token, whatever the merges say."""
    add_bos: bool = False
    """Unless the file says otherwise."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Cut into words, then write each byte as a printable character."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])

    def normalizer(self) -> normalizers.Normalizer | None:
        """What happens to the text before it is cut."""
        return normalizers.NFC() if self.nfc else None


DEFAULT_KIND = PreTokenizerKind((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", TRIPLETS))

_GPT2_LIKE = PreTokenizerKind((GPT2,))
_DIGITS = PreTokenizerKind((DIGIT, GPT2))
_NEOX = PreTokenizerKind((GPT2,), nfc=True)
_CL100K = PreTokenizerKind((_cl100k(r"\p{N}{1,3}"),))
_LLAMA3 = PreTokenizerKind((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_ONE_DIGIT = PreTokenizerKind((_cl100k(r"\p{N}"),))
_QWEN2 = PreTokenizerKind((_cl100k(r"\p{N}"),), nfc=True)
_V3 = PreTokenizerKind((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3))
_GPT4O = PreTokenizerKind((_o200k(r"\p{N}{1,3}", _CONTRACTIONS + "?"),))
_MARKS = PreTokenizerKind((NOT_CLAUSE_MARKS,))

_KINDS: dict[str, PreTokenizerKind] = {
    "default": DEFAULT_KIND,
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion"), _GPT2_LIKE),
    **dict.fromkeys(("granite-docling",), _GPT2_LIKE),
    **dict.fromkeys(("mpt", "olmo"), _NEOX),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS),
    "command-r": PreTokenizerKind((DIGIT, GPT2), nfc=True),
    "falcon": PreTokenizerKind((PUNCTUATION, GPT2, TRIPLETS)),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "kormo"), _QWEN2),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "solar-open", "grok-2"), _ONE_DIGIT),
    "qwen35": PreTokenizerKind((_cl100k(r"\p{N}", letters=r"\p{L}\p{M}"),), nfc=True),
    "ufakzeka": PreTokenizerKind((_cl100k(r"\p{N}", contractions=""),)),
    "seed-coder": PreTokenizerKind(
        (rf"{_CONTRACTIONS}|{_BEFORE_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_NEWLINES}",)
    ),
    "deepseek-llm": PreTokenizerKind(
        ("[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizerKind(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _V3),
    "tekken": PreTokenizerKind((_o200k(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _MARKS),
    "viking": PreTokenizerKind((NOT_CLAUSE_MARKS, DIGIT)),
}


def kind_of(name: str) -> PreTokenizerKind | None:
    """The kind of this name; None where it is not known."""
    return _KINDS.get(name)

"""How a model pools: what the user says, what a sentence-transformers folder says, what an architecture usually does.

Owns ``--runner``, ``--pooler-config`` and the files modules.json, N_Pooling/config.json and sentence_bert_config.json.
Must not read weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pagemill.config import EngineConfig
from pagemill.errors import ConfigError, ModelFormatError, UnsupportedModelError
from pagemill.model_config import ModelConfig, PoolingConfig
from pagemill.models.checkpoint import Checkpoint, read_json

__all__ = ["pooling_of", "usual_context"]

KINDS = {"CLS": "cls", "LAST": "last", "MEAN": "mean"}
"""vLLM's name -> ours."""
MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": None,
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_weightedmean_tokens": None,
}
"""sentence-transformers' switch -> our name; None: not implemented."""
MODULES = ("Transformer", "Pooling", "Normalize")


def pooling_of(checkpoint: Checkpoint, model: ModelConfig, config: EngineConfig) -> PoolingConfig | None:
    """How this model pools; None where it generates. Raises ConfigError, ModelFormatError, UnsupportedModelError."""
    modules = _modules(checkpoint)
    pools = not model.causal or bool(modules) or _is_headless(checkpoint)
    if config.runner == "generate" and not model.causal:
        raise ConfigError(
            f"--runner=generate: {model.architecture} is an encoder and makes no text; leave --runner out, or name a "
            "model that generates"
        )
    if config.runner == "generate" or (config.runner == "auto" and not pools):
        if config.pooler_config is not None:
            raise ConfigError("--pooler-config is for models that pool; add --runner=pooling")
        return None
    scores = _num_scores(checkpoint)
    kind, normalize = "last" if model.causal else "cls", True
    if modules and not scores:
        kind, normalize = _from_modules(checkpoint.source.path, modules)
    given = _given(config.pooler_config)
    return PoolingConfig(
        kind=given.get("pooling_type", kind),
        normalize=given.get("normalize", normalize),
        num_scores=scores,
        score_activation=_score_activation(checkpoint.config, scores),
        labels=_labels(checkpoint.config, scores),
    )


def usual_context(checkpoint: Checkpoint, model: ModelConfig) -> int | None:
    """sentence-transformers' max_seq_length: what the model was trained on, often less than it has positions for."""
    if checkpoint.format == "gguf":
        return None
    found = (read_json(checkpoint.source.path / "sentence_bert_config.json") or {}).get("max_seq_length")
    return min(found, model.max_position_embeddings) if type(found) is int and found > 0 else None


def _modules(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The stages of a sentence-transformers model; empty for any other."""
    path = checkpoint.source.path / "modules.json"
    if checkpoint.format == "gguf" or not path.is_file():
        return []
    try:
        modules = json.loads(path.read_bytes())
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        found = [{"kind": kind, "path": str(module["path"])} for kind, module in zip(kinds, modules, strict=True)]
    except (ValueError, TypeError, KeyError) as error:
        raise ModelFormatError(f"{path} is no list of modules with type and path; fetch it again") from error
    for kind in kinds:
        if kind not in MODULES:
            raise UnsupportedModelError(f"{path} has a module {kind!r}; supported are {', '.join(MODULES)}")
    return found


def _from_modules(folder: Path, modules: list[dict[str, Any]]) -> tuple[str, bool]:
    """Kind of pooling, and whether vectors are normalised."""
    stages = [module for module in modules if module["kind"] == "Pooling"]
    if len(stages) != 1:
        raise UnsupportedModelError(f"{folder}/modules.json has {len(stages)} pooling stages; one is supported")
    inside = PurePosixPath(stages[0]["path"])
    if inside.is_absolute() or ".." in inside.parts:
        raise ModelFormatError(f"{folder}/modules.json names {stages[0]['path']!r}, which is not inside the folder")
    path = folder / inside / "config.json"
    settings = read_json(path)
    if settings is None:
        raise ModelFormatError(f"{path} is missing; fetch the model again")
    on = [mode for mode in MODES if settings.get(mode) is True]
    if len(on) != 1 or MODES[on[0]] is None:
        raise UnsupportedModelError(
            f"{path} asks for {', '.join(on) or 'no pooling'}; supported are cls, last and mean"
        )
    return str(MODES[on[0]]), any(module["kind"] == "Normalize" for module in modules)


def _given(text: str | None) -> dict[str, Any]:
    """``--pooler-config``, in our words."""
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f'--pooler-config={text!r} must be a JSON object, such as {{"pooling_type": "MEAN"}}')
    unknown = sorted(set(values) - {"pooling_type", "normalize"})
    if unknown:
        raise ConfigError(f"--pooler-config has {unknown[0]!r}; known are pooling_type and normalize")
    found: dict[str, Any] = {}
    if "pooling_type" in values:
        kind = str(values["pooling_type"]).upper()
        if kind not in KINDS:
            raise ConfigError(f"--pooler-config: pooling_type={kind!r} is unknown; choose one of {', '.join(KINDS)}")
        found["pooling_type"] = KINDS[kind]
    if "normalize" in values:
        if not isinstance(values["normalize"], bool):
            raise ConfigError("--pooler-config: normalize must be true or false")
        found["normalize"] = values["normalize"]
    return found


def _is_headless(checkpoint: Checkpoint) -> bool:
    """Whether a decoder was saved without what makes logits: LlamaModel in place of LlamaForCausalLM."""
    names = checkpoint.config.get("architectures") if checkpoint.format != "gguf" else None
    return isinstance(names, list) and bool(names) and str(names[0]).endswith("Model")


def _num_scores(checkpoint: Checkpoint) -> int:
    """Outputs of a sequence classifier; 0 for a model that embeds."""
    config = checkpoint.config
    names = config.get("architectures") if checkpoint.format != "gguf" else None
    if not names or not str(names[0]).endswith("ForSequenceClassification"):
        return 0
    labels = config.get("id2label")
    count = config.get("num_labels", len(labels) if isinstance(labels, Mapping) else 2)  # 2 is transformers' default
    if type(count) is not int or not 1 <= count <= 1 << 16:
        raise ModelFormatError(f"config.json: num_labels={count!r} must be a whole number from 1 to {1 << 16}")
    return count


def _score_activation(config: Mapping[str, Any], scores: int) -> str:
    """What the config names, else a sigmoid over one score or independent ones, and a softmax over classes."""
    inner = config.get("sentence_transformers")
    named = inner.get("activation_fn") if isinstance(inner, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if not scores:
        return "identity"
    if named is None:
        alone = scores == 1 or config.get("problem_type") == "multi_label_classification"
        return "sigmoid" if alone else "softmax"
    kind = str(named).rpartition(".")[2].lower()
    if kind not in ("sigmoid", "identity"):
        raise UnsupportedModelError(f"config.json names the score activation {named!r}; supported: Sigmoid, Identity")
    return kind


def _labels(config: Mapping[str, Any], scores: int) -> tuple[str, ...]:
    """Names of a classifier's outputs; none where the config has not one for each."""
    named = config.get("id2label")
    found = [named.get(str(index)) for index in range(scores)] if isinstance(named, Mapping) else []
    return tuple(map(str, found)) if None not in found else ()

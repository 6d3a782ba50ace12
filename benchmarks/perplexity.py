#!/usr/bin/env python
"""Perplexity of a text, through the whole engine, and beside it transformers' on the same weights.

    python benchmarks/perplexity.py TEXT [--model M] [--dtype D] [--quantization int8] [--kv-cache-dtype int8]
        [--kernels K] [--transformers]

The text (WikiText-2's validation split, https://huggingface.co/datasets/Salesforce/wikitext) is cut into windows that
do not overlap; every token but a window's first counts. JSON goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagemill import LLM, SamplingParams
from pagemill.config import DEFAULT_MODEL
from pagemill.models.sources import resolve_source
from pagemill.models.tokenizer import load_tokenizer


def windows_of(model: str, text: Path, num_tokens: int, context: int) -> list[list[int]]:
    """The first tokens of the text, cut into windows of ``context``."""
    tokenizer = load_tokenizer(resolve_source(model), None)
    # about three characters a token at the very least, so that the whole text is not tokenised for a short run
    ids = tokenizer.encode(text.read_text()[: num_tokens * 8], add_special_tokens=False)[:num_tokens]
    return [ids[at : at + context] for at in range(0, len(ids), context) if len(ids) - at > 1]


def with_engine(windows: Sequence[list[int]], options: dict[str, Any]) -> float:
    """Sum of -log p of every token but each window's first."""
    llm = LLM(**options)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    total = 0.0
    for ids, output in zip(windows, llm.generate(list(windows), params), strict=True):
        assert output.prompt_logprobs is not None
        total -= sum(
            entry[token].logprob for token, entry in zip(ids, output.prompt_logprobs, strict=True) if entry is not None
        )
    return total


def with_transformers(windows: Sequence[list[int]], model: str, dtype: str) -> float:
    """The same sum by transformers; a GGUF file's weights are dequantised."""
    import torch
    import transformers

    source = resolve_source(model)
    where = {"gguf_file": source.path.name} if source.format == "gguf" else {}
    folder = source.path.parent if source.format == "gguf" else source.path
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **where).eval()
    total = 0.0
    with torch.inference_mode():
        for ids in windows:
            logits = reference(torch.tensor([ids])).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
    return total


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--num-tokens", type=int, default=5120)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--transformers", action="store_true", help="measure transformers too, on the same weights")
    args = parser.parse_args()
    windows = windows_of(args.model, args.text, args.num_tokens, args.context)
    count = sum(len(window) - 1 for window in windows)
    names = ("model", "dtype", "quantization", "kv_cache_dtype", "kernels")
    options = {name: getattr(args, name) for name in names}
    started = time.perf_counter()
    found: dict[str, Any] = {"options": options, "tokens": count, "context": args.context}
    found["perplexity"] = math.exp(with_engine(windows, options) / count)
    found["seconds"] = time.perf_counter() - started
    if args.transformers:
        dtype = "float32" if args.dtype == "auto" else args.dtype
        found["transformers"] = math.exp(with_transformers(windows, args.model, dtype) / count)
        found["ratio"] = found["perplexity"] / found["transformers"]
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

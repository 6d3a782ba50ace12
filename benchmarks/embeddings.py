"""Texts and tokens per second of an embedding model, beside transformers on the same texts; JSON out.

    python benchmarks/embeddings.py [--model all-minilm-l6-v2] [--texts 512] [--dtype auto] [--json out.json]

Texts are drawn once, of lengths as sentences (mean 20 words) and as paragraphs have (mean 120). Both sides run on as
many threads, one after the other, in turns; the best of the rounds counts. transformers gets the texts sorted by length
in batches of 32, padded, as sentence-transformers does it, in float32 or bfloat16 as the other side. Also told: how
far the vectors are from each other, and the HTTP route's rate with 32 texts a request.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "time only new could these two may first then do any like my now over such our man me even most made after also "
    "river market engine memory page library science music garden winter morning question answer language computer"
).split()
BATCH = 32
ROUNDS = 3


def draw(count: int, mean_words: int) -> list[str]:
    """Texts of half to one and a half times the mean length."""
    rng = random.Random(1)
    return [
        " ".join(rng.choices(WORDS, k=rng.randint(mean_words // 2, mean_words * 3 // 2))) + "." for _ in range(count)
    ]


def best(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the quickest of the rounds, and the last result."""
    times, result = [], None
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - begin)
    return min(times), result


def transformers_side(folder: Path, threads: int, bfloat16: bool) -> Callable[[list[str], int], np.ndarray]:
    """Mean pooling as sentence-transformers does it: texts, longest input -> vectors."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype).eval()

    def run(texts: list[str], longest: int) -> np.ndarray:
        torch.set_num_threads(threads)
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        out = np.zeros((len(texts), model.config.hidden_size), np.float32)
        for at in range(0, len(order), BATCH):
            part = order[at : at + BATCH]
            inputs = tokenizer(
                [texts[i] for i in part], padding=True, truncation=True, max_length=longest, return_tensors="pt"
            )
            with torch.inference_mode():
                states = model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"].unsqueeze(-1)
            mean = (states * mask).sum(1) / mask.sum(1)
            out[part] = torch.nn.functional.normalize(mean, dim=-1).numpy()
        return out

    return run


def served(args: argparse.Namespace, texts: list[str]) -> float:
    """Texts per second over HTTP, 32 in a request, four requests at a time."""
    import re
    import subprocess
    import sys
    from concurrent.futures import ThreadPoolExecutor

    import openai

    command = [sys.executable, "-m", "pagemill", "serve", args.model, "--port", "0", "--dtype", args.dtype]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = next(found[1] for line in process.stdout if (found := re.search(r"web page: (http://\S+)/", line)))
    try:
        with openai.OpenAI(base_url=url + "/v1", api_key="none") as client, ThreadPoolExecutor(4) as pool:

            def ask(at: int) -> int:
                return len(client.embeddings.create(model="", input=texts[at : at + BATCH]).data)

            seconds, _ = best(lambda: sum(pool.map(ask, range(0, len(texts), BATCH))))
    finally:
        process.terminate()
        process.wait()
    return len(texts) / seconds


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="all-minilm-l6-v2")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from pagemill import LLM
    from pagemill.bench import report
    from pagemill.platform import select_platform

    threads = select_platform("cpu").num_threads()
    llm = LLM(args.model, dtype=args.dtype)
    folder = Path(llm.config.model)
    theirs = transformers_side(folder, threads, args.dtype == "bfloat16")
    settings = {"model": args.model, "dtype": args.dtype, "threads": threads, "cpus": os.cpu_count()}
    results: dict[str, Any] = {}
    import torch

    for name, mean_words in (("sentences", 20), ("paragraphs", 120)):
        texts = draw(args.texts if name == "sentences" else args.texts // 4, mean_words)

        def ours(texts: list[str] = texts) -> list[list[float]]:
            torch.set_num_threads(1)  # the native kernels have their own
            outputs = llm.embed(texts, use_tqdm=False, truncate_prompt_tokens=-1)
            return [output.outputs.embedding for output in outputs]

        seconds, vectors = best(ours)
        their_seconds, their_vectors = best(lambda texts=texts: theirs(texts, llm.max_model_len))
        tokens = sum(len(ids) for ids in llm.tokenizer.encode_batch(texts))
        results[name] = {
            "texts": len(texts),
            "tokens": tokens,
            "texts_per_s": len(texts) / seconds,
            "tokens_per_s": tokens / seconds,
            "transformers_texts_per_s": len(texts) / their_seconds,
            "ratio": their_seconds / seconds,
            "largest_difference": float(np.abs(np.float32(vectors) - their_vectors).max()),
        }
    llm.shutdown()
    results["http_sentences_per_s"] = served(args, draw(args.texts, 20))
    print(json.dumps(results, indent=1))
    report.write(args.json, "embeddings", settings, results)


if __name__ == "__main__":
    main()

"""What each form of the weights costs and gives: perplexity, loss, W1, W2 and memory side by side; JSON, a table.

    python benchmarks/forms.py TEXT --out benchmarks/results/forms.json
    python benchmarks/forms.py TEXT --out ... --forms Q4_0,int8 --measure speed      # adds to what the file holds

Every form in a process of its own. GGUF types are made by llama-quantize from the embedded file's dequantised weights,
and compared with the same file dequantised to float32 (``--dtype float32``, keys and values in float32, too); int8 and
bfloat16 with the embedded file in float32. SmolLM2-135M's rows of 576 hold no whole block of a K quant, so that
llama-quantize falls back to Q5_0, Q5_1 or Q8_0 for most of a K file; "768" is the same model with zeros up to 768,
where every matrix is of the type named.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import perplexity
from peers import checkpoints, engines

from pagemill import LLM
from pagemill.bench import offline, report, workloads
from pagemill.models.sources import resolve_source

PLAIN: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "Q4_1": {},
}
"""Options on the embedded file, which is Q4_1."""
FILES = ("Q4_0", "Q5_0", "Q5_1", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K")
WIDE = ("Q2_K 768", "Q3_K 768", "Q4_K 768", "Q5_K 768", "Q6_K 768")


def options_of(form: str) -> dict[str, str]:
    """What the engine is told."""
    if form in PLAIN:
        return PLAIN[form]
    binaries = engines.install_llama_cpp()
    plain = engines.requantized(binaries, resolve_source("smollm2-135m-instruct").path, "BF16")
    if form in FILES:
        return {"model": str(engines.requantized(binaries, plain, form))}
    wide = checkpoints.widened(plain, plain.with_name("SmolLM2-135M-Instruct-768.BF16.gguf"), 12)
    return {"model": str(engines.requantized(binaries, wide, form.split()[0], "--pure"))}


def quality(form: str, text: Path, num_tokens: int) -> dict[str, float]:
    """Perplexity with the form's own kernels, and of its weights in float32."""
    options = options_of(form)
    windows = perplexity.windows_of(options.get("model", "smollm2-135m-instruct"), text, num_tokens, 512)
    count = sum(len(window) - 1 for window in windows)
    found = math.exp(perplexity.with_engine(windows, dict(options)) / count)
    reference = {"dtype": "float32"} | {key: value for key, value in options.items() if key == "model"}
    exact = found if form == "float32" else math.exp(perplexity.with_engine(windows, dict(reference)) / count)
    return {"tokens": count, "perplexity": found, "float32_perplexity": exact, "loss": found / exact - 1}


def speed(form: str, repetitions: int) -> dict[str, float]:
    """W1 and W2 in process, medians, and the most memory that this process had."""
    llm = LLM(**options_of(form))  # type: ignore[arg-type]  # the fields that are text
    offline.warm_up(llm)
    many = [offline.throughput(llm, workloads.build("w1", llm.tokenizer.encode, i)) for i in range(repetitions)]
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    one = report.medians(
        [offline.latency(llm, workloads.build("w2", llm.tokenizer.encode, i)) for i in range(repetitions)]
    )
    return {
        "w1_tokens_per_s": report.medians(many)["output_tokens_per_s"],
        "w2_tokens_per_s": one["decode_tokens_per_s"],
        "w2_ttft_ms": one["ttft_ms"],
        "peak_rss_mb": peak_mb,
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown, a form a row."""
    columns = {
        "perplexity": "{:.3f}", "float32_perplexity": "{:.3f}", "loss": "{:+.2%}", "w1_tokens_per_s": "{:.0f}",
        "w2_tokens_per_s": "{:.0f}", "w2_ttft_ms": "{:.0f}", "peak_rss_mb": "{:.0f}",
    }  # fmt: skip
    lines = ["| form | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for form, found in results.items():
        cells = [pattern.format(found[name]) if name in found else "" for name, pattern in columns.items()]
        lines.append(f"| {form} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """A child for each form and measurement, whose findings are stored as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--forms", default=",".join((*PLAIN, *FILES, *WIDE)))
    parser.add_argument("--measure", default="quality,speed")
    parser.add_argument("--num-tokens", type=int, default=10240)
    parser.add_argument("--repetitions", type=int, default=3, help="of W1 and W2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        found = (
            speed(args.forms, args.repetitions)
            if args.measure == "speed"
            else quality(args.forms, args.text, args.num_tokens)
        )
        args.out.write_text(json.dumps(found))
        return
    results = json.loads(args.out.read_text())["results"] if args.out.exists() else {}
    part = args.out.with_suffix(".part")
    for form in args.forms.split(","):
        for what in args.measure.split(","):
            options = ["--forms", form, "--measure", what, "--num-tokens", str(args.num_tokens)]
            options += ["--repetitions", str(args.repetitions), "--out", str(part)]
            subprocess.run([sys.executable, __file__, str(args.text), *options, "--child"], check=True)
            results.setdefault(form, {}).update(json.loads(part.read_text()))
            part.unlink()
            print(form, results[form], file=sys.stderr, flush=True)
            report.write(args.out, "forms", {"repetitions": args.repetitions}, results)
    print(table(results))


if __name__ == "__main__":
    main()

"""lm-evaluation-harness over HTTP computes the perplexity that the engine has in process."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagemill import LLM, SamplingParams
from tests.clients.conftest import PROGRAM_S, ROOT
from tests.server.process import ServeProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PROGRAM_S)]

MAX_LENGTH = 512
PAGES = ("architecture.md", "memory.md", "models.md", "offline.md")


def windows(ids: list[int], first: int) -> Iterator[tuple[list[int], int]]:
    """Prompts and how many of their last tokens count, as the harness cuts a document."""
    size = MAX_LENGTH - 2  # one for the context of a window, one for the output that the harness does not look at
    told = min(size, len(ids))
    yield [first, *ids[:told]], told
    while told < len(ids):
        count = min(size, len(ids) - told)
        yield ids[told + count - size - 1 : told + count], count
        told += count


def test_perplexity_over_http_is_the_one_in_process(
    run_python: Callable[..., str], server: ServeProcess, tmp_path: Path
) -> None:
    pages = [(ROOT / "docs" / name).read_text() for name in PAGES]
    documents = tmp_path / "pages.json"
    documents.write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
    over_http = float(run_python(server, "lm_eval_perplexity.py", str(documents), str(MAX_LENGTH)).split()[-1])

    llm = LLM(max_model_len=1024, max_num_seqs=4)
    tokenizer = llm.tokenizer
    assert tokenizer.bos_id is not None
    cut = [
        window
        for page in pages
        for window in windows(tokenizer.encode(page, add_special_tokens=False), tokenizer.bos_id)
    ]
    assert len(cut) > 2 * len(pages)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    total = 0.0
    for (ids, count), output in zip(cut, llm.generate([ids for ids, _ in cut], params), strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in list(zip(ids, output.prompt_logprobs, strict=True))[-count:]:
            assert entry is not None
            total += entry[token].logprob
    words = sum(len(re.split(r"\s+", page)) for page in pages)
    assert over_http == pytest.approx(math.exp(-total / words), rel=1e-4)

"""The embedded model in float32 chooses the tokens that transformers chooses on the same dequantised weights."""

from __future__ import annotations

import pytest
import torch

from pagemill.engine.offline import LLM
from pagemill.models.sources import ModelSource
from pagemill.params import SamplingParams

NUM_PROMPTS, NUM_TOKENS = 50, 64
TIE = 1e-3
"""Two candidates whose logits are this close are a tie: which one is best depends on the order of summation."""
TOPICS = ("the sea", "a clock", "Paris", "prime numbers", "bread", "an old map", "rain", "the number 7", "foxes", "tea")
FORMS = (
    "Write about {}.",
    "Once upon a time there was something like {} and",
    "Q: What is {}?\nA:",
    "def describe():\n    # {}\n",
    "1. {}\n2.",
)


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(embedded_source: ModelSource) -> None:
    import transformers

    prompts = [form.format(topic) for topic in TOPICS for form in FORMS]
    assert len(prompts) == NUM_PROMPTS
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(dtype="float32", kv_cache_dtype="float32") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        embedded_source.path.parent, gguf_file=embedded_source.path.name, dtype=torch.float32
    ).eval()
    differing = 0
    for output in outputs:
        prompt, produced = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(produced) == NUM_TOKENS
        with torch.inference_mode():
            # [T, V]: row i says what follows the first i + 1 tokens
            logits = reference(torch.tensor([prompt + produced])).logits[0].float()
        following = logits[len(prompt) - 1 : -1]
        behind = following.max(dim=-1).values - following[torch.arange(NUM_TOKENS), torch.tensor(produced)]
        assert behind.max() < TIE, f"{output.prompt!r}: token {int(behind.argmax())} is {behind.max():.4f} behind"
        differing += int((behind > 0).sum())
    assert differing <= NUM_PROMPTS * NUM_TOKENS // 100

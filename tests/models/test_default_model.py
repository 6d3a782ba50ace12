"""The embedded model against transformers on the same, dequantised weights."""

from __future__ import annotations

import pytest
import torch

from pagemill import LLM, SamplingParams
from pagemill.config import DEFAULT_MODEL
from pagemill.models.sources import resolve_source

NUM_TOKENS = 64
CLOSE = 1e-3
"""Two candidates whose logits are this close may change places."""
TOPICS = [
    "the sea",
    "bread",
    "a lost key",
    "winter",
    "prime numbers",
    "a quiet street",
    "iron",
    "owls",
    "the moon",
    "tea",
]
STARTS = [
    "Write about {}.",
    "{} is",
    "Once there was someone who loved {}",
    "Q: What is {}?\nA:",
    "def describe():  # {}",
]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(1800)
def test_greedy_tokens_of_fifty_prompts_equal_transformers_float32() -> None:
    import transformers

    prompts = [start.format(topic) for start in STARTS for topic in TOPICS]
    llm = LLM(dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    source = resolve_source(DEFAULT_MODEL)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    ).eval()
    for output in outputs:
        prompt, new = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(new) == NUM_TOKENS
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1]
        for position, token in enumerate(new):
            best = int(logits[position].argmax())
            if token != best:
                assert logits[position, best] - logits[position, token] < CLOSE, (output.prompt, position)
                break
